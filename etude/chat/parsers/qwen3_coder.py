"""The format of Qwen3-Coder, as elements:

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Beijing
    </parameter>
    </function>
    </tool_call>

Texts are not quoted; the tool's schema tells their types. As in vLLM, an argument may lack its closing tag where the next
one begins or the function ends, a function its own where the next one begins, several functions may stand in one block, and
a function may stand without a block.
"""

from __future__ import annotations

import re

from etude.chat.parsers.base import ToolParser
from etude.chat.parsers.element_call import ElementBlockParser, ElementFormat

_FUNCTION = "<function="


def function_elements(opening: str, closing: str, *thought_ends: str) -> ElementFormat:
    """Elements of functions and parameters, in blocks with the given tags."""
    return ElementFormat(
        call=(r"<function\b", r"=([^<>\n]*)>"),
        call_end="</function>",
        argument=(r"<parameter\b", r"=([^<>\n]*)>"),
        argument_end="</parameter>",
        block=(opening, closing),
        thought_ends=("</think>", *thought_ends),
        form="<parameter=key>value</parameter> in <function=name>",
        lenient=True,
    )


@ToolParser.register("qwen3_coder", "qwen3_xml")
class Qwen3CoderToolParser(ElementBlockParser):
    """Parser of `<function=…>` elements, in `<tool_call>` tags or alone."""

    opening = ("<tool_call>", _FUNCTION)
    closing = ("</tool_call>",)
    elements = function_elements("<tool_call>", "</tool_call>")
    alone = re.compile(rf"{_FUNCTION}([^<>\n]*)(?:(>)|\Z)")
