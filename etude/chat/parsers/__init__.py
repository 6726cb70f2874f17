"""Tool-call formats, one file each; importing this room registers them."""

from etude.chat.parsers.base import TOOL_PARSERS, ParsedResponse, ToolParser
from etude.chat.parsers.hermes import HermesToolParser

__all__ = ["TOOL_PARSERS", "HermesToolParser", "ParsedResponse", "ToolParser"]
