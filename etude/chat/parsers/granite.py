"""The formats of IBM's Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}, …]`.

Granite 3.1 writes `<tool_call>`, Granite 4 closes the block with `</tool_call>`, and the 20B function-calling model writes
`<function_call> {…}`, one object for each tag; all are read. A turn may begin with the list, without a tag.
"""

from __future__ import annotations

from etude.chat.parsers.bare import LIST_OF_CALLS, BareParser
from etude.chat.parsers.base import ToolParser
from etude.chat.parsers.blocks import JsonBlockParser


@ToolParser.register("granite")
class GraniteToolParser(BareParser, JsonBlockParser):
    """Parser of a list of JSON calls, after a tag or alone."""

    opening = ("<|tool_call|>", "<tool_call>", "<function_call>")
    closing = ("</tool_call>", "</function_call>")
    may_stay_open = True
    special_tokens = opening
    bare = LIST_OF_CALLS
