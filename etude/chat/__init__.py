"""Messages to token ids and back: exact multi-turn assembly, and the parsers of tool calls."""

from etude.chat.parsers import TOOL_PARSERS, HermesToolParser, ParsedResponse, ToolParser
from etude.chat.template import ChatTemplate
from etude.schemas import FunctionCall

__all__ = ["TOOL_PARSERS", "ChatTemplate", "FunctionCall", "HermesToolParser", "ParsedResponse", "ToolParser"]
