"""Parsers of calls written as XML-like elements: Qwen3-Coder, Seed-OSS, MiniMax-M2, DeepSeek V3.2, Kimi K3.

Strings are not quoted; an argument's type comes from the tool's schema or from the argument's tag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from etude.chat.parsers.base import ParsedResponse, ToolParser, Tools
from etude.chat.parsers.element_call import ElementBlockParser, ElementFormat
from etude.chat.parsers.typed import json_or_text

_FUNCTION = "<function="


def function_elements(opening: str, closing: str, *thought_ends: str) -> ElementFormat:
    """Makes the format of `<function=…>` and `<parameter=…>` elements, in blocks with the given tags."""
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

    As in vLLM, an argument's closing tag may be missing before the next argument or the end of the function, a function's
    before the next function; several functions may be in one block, and a function may be outside of blocks.
    """

    opening = ("<tool_call>", _FUNCTION)
    closing = ("</tool_call>",)
    elements = function_elements("<tool_call>", "</tool_call>")
    written = (
        "<tool_call>\n",
        "<function={name}>\n",
        "<parameter={key}>\n{value}\n</parameter>\n",
        "</function>\n",
        "</tool_call>",
    )
    alone = re.compile(rf"{_FUNCTION}([^<>\n]*)(?:(>)|\Z)")


@ToolParser.register("seed_oss", "seed")
class SeedOssToolParser(Qwen3CoderToolParser):
    """The format of Seed-OSS, as elements, with reasoning in `<seed:think>`:

        <seed:tool_call>
        <function=get_weather>
        <parameter=city>Beijing</parameter>
        </function>
        </seed:tool_call>

    A function may be outside of blocks, as in vLLM.
    """

    opening = ("<seed:tool_call>", Qwen3CoderToolParser.opening[1])
    closing = ("</seed:tool_call>",)
    elements = function_elements("<seed:tool_call>", "</seed:tool_call>", "</seed:think>")
    written = (
        "<seed:tool_call>\n",
        "<function={name}>\n",
        "<parameter={key}>{value}</parameter>\n",
        "</function>\n",
        "</seed:tool_call>",
    )
    reasoning_tags = (("<seed:think>", "</seed:think>"), ("<think>", "</think>"))
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

    No closing tag may be missing. As in vLLM, a call may be outside of blocks; an opening tag in content that is followed by
    neither an argument nor a closing tag is text.
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
    written = (
        "<minimax:tool_call>\n",
        '<invoke name="{name}">\n',
        '<parameter name="{key}">{value}</parameter>\n',
        "</invoke>\n",
        "</minimax:tool_call>",
    )
    alone = re.compile(rf"<invoke{_NAMED}(?:(>)(?=\s*(?:<parameter\b|</invoke>|(?:<[/\w]*)?\Z))|\Z)")


def _key_of(tag: str) -> str:
    """Extracts the name from a tag's captured attributes."""
    return tag.split('"')[0].replace("&quot;", '"').replace("&amp;", "&").strip()


def _value_of(tag: str, text: str, schemas: Mapping[str, Any]) -> Any:
    """Converts an argument whose tag says whether it is a string; anything else is JSON."""
    return text if tag.endswith(("string", "true")) else json_or_text(text)


_DSML = "｜DSML｜"
_SAID = r'="([^"<>\n]*" string="(?:true|false))">'


@ToolParser.register("deepseek_v32", "deepseek_v3.2", "deepseek_v4")
class DeepseekV32ToolParser(ElementBlockParser):
    """The format of DeepSeek V3.2, as elements that say whether they are strings; V4 calls the block `tool_calls`:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Beijing</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
    """

    opening = (f"<{_DSML}function_calls>", f"<{_DSML}invoke name=")
    closing = (f"</{_DSML}function_calls>",)
    special_tokens = (_DSML,)
    elements = ElementFormat(
        call=(rf"<{_DSML}invoke\b", r' name="([^"<>\n]*)">'),
        call_end=f"</{_DSML}invoke>",
        argument=(rf"<{_DSML}parameter\b", f" name{_SAID}"),
        argument_end=f"</{_DSML}parameter>",
        block=(opening[0], closing[0]),
        form=f'<{_DSML}parameter name="key" string="true">value</{_DSML}parameter>',
        key=_key_of,
        value=_value_of,
    )
    written = (
        f"<{_DSML}function_calls>\n",
        f'<{_DSML}invoke name="{{name}}">\n',
        f'<{_DSML}parameter name="{{key}}" string="{{is_text}}">{{value}}</{_DSML}parameter>\n',
        f"</{_DSML}invoke>\n",
        f"</{_DSML}function_calls>",
    )
    alone = re.compile(rf'<{_DSML}invoke name="([^"<>\n]*)"(?:(>)|\Z)')

    def parse(self, text: str, tools: Tools | None = None) -> ParsedResponse:
        return super().parse(text.replace(f"{_DSML}tool_calls>", f"{_DSML}function_calls>"), tools)


@ToolParser.register("kimi_k3")
class KimiK3ToolParser(ElementBlockParser):
    """The format of Kimi K3, as elements of a channel, whose arguments state their types:

        <|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>
        <|open|>argument key="city" type="string"<|sep|>Beijing<|close|>argument<|sep|>
        <|close|>call<|sep|><|close|>tools<|sep|>

    Content is in the channel `response` before it, reasoning in `think`.
    """

    opening = ("<|open|>tools<|sep|>", "<|open|>call tool=")
    closing = ("<|close|>tools<|sep|>",)
    glue = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    reasoning_tags = (("<|open|>think<|sep|>", "<|close|>think<|sep|>"), ("<think>", "</think>"))
    special_tokens = ("<|open|>", "<|close|>", "<|sep|>")
    plain_content = False
    elements = ElementFormat(
        call=(r"<\|open\|>call\b", r' tool="([^"<>\n]*)"[^<>\n]*<\|sep\|>'),
        call_end="<|close|>call<|sep|>",
        argument=(r"<\|open\|>argument\b", r' key="([^"<>\n]*" type="\w*)"<\|sep\|>'),
        argument_end="<|close|>argument<|sep|>",
        block=(opening[0], closing[0]),
        thought_ends=(reasoning_tags[0][1], "</think>"),
        form='<|open|>argument key="key" type="string"<|sep|>value<|close|>argument<|sep|>',
        key=_key_of,
        value=_value_of,
    )
    written = (
        "<|open|>tools<|sep|>",
        '<|open|>call tool="{name}" index="{number}"<|sep|>',
        '<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
        "<|close|>call<|sep|>",
        "<|close|>tools<|sep|>",
    )
    alone = re.compile(r'<\|open\|>call tool="([^"<>\n]*)"[^<>\n]*(?:(<\|sep\|>)|\Z)')
