"""The Hermes format, also Qwen's: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

One object a block; valid JSON only, nothing is repaired. A tag inside a JSON string is text.
"""

from __future__ import annotations

from etude.chat.parsers.base import ToolParser
from etude.chat.parsers.blocks import Found, JsonBlockParser, attempt
from etude.chat.parsers.json_call import call_of, decode
from etude.schemas import FunctionCall


@ToolParser.register("hermes", "qwen")
class HermesToolParser(JsonBlockParser):
    """Parser of JSON calls in `<tool_call>` tags."""

    opening = ("<tool_call>",)
    closing = ("</tool_call>",)

    def read_calls(self, body: str) -> Found:
        """The one call of a block."""
        return [attempt(_read_call, body)]


def _read_call(body: str) -> FunctionCall:
    return call_of(decode(body))
