"""The format of Qwen3-Coder, as elements:

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Beijing
    </parameter>
    </function>
    </tool_call>

Texts are not quoted; the tool's schema tells their types. As in vLLM, tags that close an argument or the function may be
missing where the next one begins, several functions may stand in one block, and a function may stand without a block.
"""

from __future__ import annotations

import re
from typing import ClassVar

from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import Block, BlockParser, Malformed, any_of, skip_space, until
from etude.chat.parsers.element_call import ElementFormat

FUNCTION, _FUNCTION_END = "<function=", "</function>"
_ELEMENTS = ElementFormat(
    call=r"<function=([^<>\n]*)>",
    call_end=_FUNCTION_END,
    argument=r"<parameter=([^<>\n]*)>",
    argument_end="</parameter>",
    lenient=True,
)
_NAME = re.compile(r"[^<>\n]*(>|\Z)?")


@ToolParser.register("qwen3_coder", "qwen3_xml")
class Qwen3CoderToolParser(BlockParser):
    """Parser of `<function=…>` elements, in `<tool_call>` tags or alone."""

    opening = ("<tool_call>", FUNCTION)
    closing = ("</tool_call>",)
    block_tags: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_block`."""
        if tag == FUNCTION:
            return self._read_alone(text, start, tools)
        body, end = until(text, start, any_of(*self.block_tags), self.closing)
        return Block(end, _ELEMENTS.read(text[start:end] if body is None else body, tools))

    def _read_alone(self, text: str, start: int, tools: Tools | None) -> Block | None:
        """The function whose name begins at `start`, and the end of a block that was not begun; prose is none."""
        name = _NAME.match(text, start)
        if name is None or name[1] is None:
            return None
        if not name[1]:
            return Block(len(text), [Malformed(f"its tag {FUNCTION} is not closed; end it with >")])
        _, end = until(text, start, any_of(_FUNCTION_END, FUNCTION, *self.block_tags), (_FUNCTION_END,))
        found = _ELEMENTS.read(text[start - len(FUNCTION) : end], tools)
        after = skip_space(text, end)
        return Block(after + len(self.block_tags[1]) if text.startswith(self.block_tags[1], after) else end, found)
