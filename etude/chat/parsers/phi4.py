"""The formats of Phi-4-mini: `functools[{"name": …, "arguments": {…}}, …]`, and `<|tool_call|>[…]<|/tool_call|>`.

`parameters` is read for `arguments`, as upstream. The word `functools` without a bracket is text.
"""

from __future__ import annotations

from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import Block, JsonBlockParser

_WORD = "functools"


@ToolParser.register("phi4", "phi4_mini_json")
class Phi4ToolParser(JsonBlockParser):
    """Parser of a list of JSON calls."""

    opening = (_WORD, "<|tool_call|>")
    closing = ("<|/tool_call|>",)
    may_stay_open = True
    arguments = ("arguments", "parameters")
    special_tokens = ("<|tool_call|>", "<|/tool_call|>")

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_block`."""
        is_word = tag == _WORD and not text.startswith("[", start)
        return None if is_word else super().read_block(text, tag, start, tools)
