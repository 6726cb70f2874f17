"""Tool-call parsers; importing this package registers them."""

from etude.chat.parsers import (  # noqa: F401 (they register themselves)
    element_formats,
    gpt_oss,
    headed_formats,
    json_formats,
    python_formats,
    rl_factory,
    search_r1,
)
from etude.chat.parsers.auto import AutoToolParser, find_other_format, format_of
from etude.chat.parsers.base import TOOL_PARSERS, ParsedResponse, ToolParser
from etude.chat.parsers.json_formats import HermesToolParser

__all__ = [
    "TOOL_PARSERS",
    "AutoToolParser",
    "HermesToolParser",
    "ParsedResponse",
    "ToolParser",
    "find_other_format",
    "format_of",
]
