"""Formats of calls as elements: Qwen3-Coder, Seed-OSS, MiniMax-M2.

Texts are not quoted; the tool's schema tells their types.
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
    """The format of Qwen3-Coder, as elements:

        <tool_call>
        <function=get_weather>
        <parameter=city>
        Beijing
        </parameter>
        </function>
        </tool_call>

    As in vLLM, an argument may lack its closing tag where the next one begins or the function ends, a function its own where
    the next one begins, several functions may stand in one block, and a function may stand without a block.
    """

    opening = ("<tool_call>", _FUNCTION)
    closing = ("</tool_call>",)
    elements = function_elements("<tool_call>", "</tool_call>")
    alone = re.compile(rf"{_FUNCTION}([^<>\n]*)(?:(>)|\Z)")


@ToolParser.register("seed_oss", "seed")
class SeedOssToolParser(Qwen3CoderToolParser):
    """The format of Seed-OSS, as elements, with thoughts in `<seed:think>`:

        <seed:tool_call>
        <function=get_weather>
        <parameter=city>Beijing</parameter>
        </function>
        </seed:tool_call>

    A function may stand without a block, as in vLLM.
    """

    opening = ("<seed:tool_call>", Qwen3CoderToolParser.opening[1])
    closing = ("</seed:tool_call>",)
    elements = function_elements("<seed:tool_call>", "</seed:tool_call>", "</seed:think>")
    thoughts = (("<seed:think>", "</seed:think>"), ("<think>", "</think>"))
    special_tokens = ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>")


_NAMED = r" name=[\"']?([^\"'<>\n]*)[\"']?"


@ToolParser.register("minimax_m2", "minimax")
class MinimaxM2ToolParser(ElementBlockParser):
    """The format of MiniMax-M2, as elements; several in one block:

        <minimax:tool_call>
        <invoke name="get_weather">
        <parameter name="city">Beijing</parameter>
        </invoke>
        </minimax:tool_call>

    All closing tags must be there. As in vLLM, a call may stand without a block; an opening tag among words that no argument
    and no closing tag follow is text.
    """

    opening = ("<minimax:tool_call>", "<invoke name=")
    closing = ("</minimax:tool_call>",)
    special_tokens = ("<minimax:tool_call>", "</minimax:tool_call>")
    elements = ElementFormat(
        call=(r"<invoke\b", f"{_NAMED}>"),
        call_end="</invoke>",
        argument=(r"<parameter\b", f"{_NAMED}>"),
        argument_end="</parameter>",
        block=special_tokens,
        form='<parameter name="key">value</parameter> in <invoke name="name">',
    )
    alone = re.compile(rf"<invoke{_NAMED}(?:(>)(?=\s*(?:<parameter\b|</invoke>|(?:<[/\w]*)?\Z))|\Z)")
