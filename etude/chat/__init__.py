"""Converts messages to token ids and back: exact multi-turn assembly, and tool-call parsers."""

from etude.chat.parsers import TOOL_PARSERS, HermesToolParser, ParsedResponse, ToolParser
from etude.chat.template import ChatTemplate
from etude.schemas import FunctionCall

__all__ = ["TOOL_PARSERS", "ChatTemplate", "FunctionCall", "HermesToolParser", "ParsedResponse", "ToolParser"]
