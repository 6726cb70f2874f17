"""The format of Qwen3-Coder, as elements:

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Beijing
    </parameter>
    </function>
    </tool_call>

Texts are not quoted; the tool's schema tells their types. As upstream, tags that close an argument or the function may be
missing where the next one begins; several functions may stand in one block.
"""

from __future__ import annotations

from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import Block, BlockParser, until
from etude.chat.parsers.element_call import ElementFormat

_ELEMENTS = ElementFormat(
    call=r"<function=([^>\n]*)>",
    call_end="</function>",
    argument=r"<parameter=([^>\n]*)>",
    argument_end="</parameter>",
    lenient=True,
)


@ToolParser.register("qwen3_coder", "qwen3_xml")
class Qwen3CoderToolParser(BlockParser):
    """Parser of `<function=…>` elements in `<tool_call>` tags."""

    opening = ("<tool_call>",)
    closing = ("</tool_call>",)

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_block`."""
        body, end = until(text, start, self._ends, self.closing)
        return Block(end, _ELEMENTS.read(text[start:end] if body is None else body, tools))
