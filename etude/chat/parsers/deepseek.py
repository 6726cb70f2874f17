"""Parsers of DeepSeek's formats: V3 and R1, and V3.1 (`｜` and `▁` are not ASCII)."""

from __future__ import annotations

import re

from etude.chat.grammar import CallForm
from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import HeadedJsonParser
from etude.chat.parsers.json_call import Unreadable, decode, function_call
from etude.schemas import FunctionCall

_BARS = ("｜", "|")
_SEPARATORS = tuple(f"<{bar}tool▁sep{bar}>" for bar in _BARS)


class DeepseekToolParser(HeadedJsonParser):
    """Base class of the DeepSeek formats: tags around a call, and JSON arguments after a head with the function's name."""

    opening = tuple(f"<{bar}tool▁call▁begin{bar}>" for bar in _BARS)
    closing = tuple(f"<{bar}tool▁call▁end{bar}>" for bar in _BARS)
    glue = tuple(f"<{bar}tool▁calls▁{edge}{bar}>" for bar in _BARS for edge in ("begin", "end"))
    sections = tuple(f"<{bar}tool▁calls▁begin{bar}>" for bar in _BARS)
    special_tokens = (*opening, *closing, *glue, *_SEPARATORS)
    head = re.compile(r"[^`{<]*<[｜|]tool▁sep[｜|]>([^`{<]*)```(?:json)?")
    head_form = f"the function's name and {_SEPARATORS[0]}"
    fence = "```"
    written = (f"function{_SEPARATORS[0]}{{name}}\n```json\n", "\n```")

    def read_call(self, named: str, arguments: str, tools: Tools | None) -> FunctionCall:
        if not named.strip():
            raise Unreadable("the function has no name")
        return function_call(named.strip(), decode(arguments))


@ToolParser.register("deepseek_v3", "deepseek_r1", "deepseek")
class DeepseekV3ToolParser(DeepseekToolParser):
    """The format of DeepSeek-V3 and R1 (`｜` and `▁` are not ASCII; the documentation has `|`, which is accepted too):

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Beijing"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    """

    call_forms = (
        CallForm(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "\n",
            "<｜tool▁calls▁end｜>",
        ),
    )


@ToolParser.register("deepseek_v31", "deepseek_v3.1")
class DeepseekV31ToolParser(DeepseekToolParser):
    """The format of DeepSeek-V3.1 (`｜` and `▁` are not ASCII):

        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Beijing"}<｜tool▁call▁end｜>
        <｜tool▁calls▁end｜>

    The documentation has `|` and line breaks, which are accepted too.
    """

    head = re.compile(r"([^`{<]*)<[｜|]tool▁sep[｜|]>")
    fence = ""
    call_forms = (
        CallForm(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "",
            "<｜tool▁calls▁end｜>",
        ),
    )
    written = (f"{{name}}{_SEPARATORS[0]}", "")
