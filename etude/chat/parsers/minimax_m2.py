"""The format of MiniMax-M2, as elements; several in one block:

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Beijing</parameter>
    </invoke>
    </minimax:tool_call>

Texts are not quoted; the tool's schema tells their types. All closing tags must be there, as upstream wants them.
"""

from __future__ import annotations

from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import Block, BlockParser, Malformed, until
from etude.chat.parsers.element_call import ElementFormat

_ELEMENTS = ElementFormat(
    call=r"<invoke name=[\"']?([^\"'<>\n]*)[\"']?>",
    call_end="</invoke>",
    argument=r"<parameter name=[\"']?([^\"'<>\n]*)[\"']?>",
    argument_end="</parameter>",
)


@ToolParser.register("minimax_m2", "minimax")
class MinimaxM2ToolParser(BlockParser):
    """Parser of `<invoke>` elements in `<minimax:tool_call>` tags."""

    opening = ("<minimax:tool_call>",)
    closing = ("</minimax:tool_call>",)
    special_tokens = (*opening, *closing)

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_block`."""
        body, end = until(text, start, self._ends, self.closing)
        if body is None:
            return Block(end, [Malformed("it is not closed; end it with </minimax:tool_call>")])
        return Block(end, _ELEMENTS.read(body, tools))
