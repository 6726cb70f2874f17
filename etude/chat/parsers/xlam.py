"""The formats of Salesforce's xLAM: a JSON list `[{"name": …, "arguments": {…}}, …]`.

It stands alone, after a thought, in a fenced block, after `[TOOL_CALLS]`, or in `<tool_call>`. A fenced block that does not
begin as a call does is text.
"""

from __future__ import annotations

import re

from etude.chat.parsers.bare import KEYS_OF_A_CALL, LIST_OF_CALLS, BareParser
from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import Block, JsonBlockParser

_LIKE_A_CALL = re.compile(rf"\s*(?:json\s+)?(?:\[\s*)?{KEYS_OF_A_CALL}")


@ToolParser.register("xlam")
class XlamToolParser(BareParser, JsonBlockParser):
    """Parser of a list of JSON calls in any of its dresses."""

    opening = ("```json", "```", "[TOOL_CALLS]", "<tool_call>")
    closing = ("```", "</tool_call>")
    may_stay_open = True
    special_tokens = ("[TOOL_CALLS]",)
    bare = LIST_OF_CALLS

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_block`."""
        if tag.startswith("`") and not _LIKE_A_CALL.match(text, start):
            return None
        return super().read_block(text, tag, start, tools)
