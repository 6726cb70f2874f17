"""Parser of Kimi-K2's format, in which the call's id contains the function's name.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Beijing"}
<|tool_call_end|><|tool_calls_section_end|>

In `functions.a.b:0` the name is `a.b`, or, as in older versions of vLLM, `b` if only that is an available tool.
"""

from __future__ import annotations

import re

from etude.chat.grammar import CallForm
from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import HeadedJsonParser
from etude.chat.parsers.json_call import Unreadable, decode, function_call
from etude.chat.parsers.typed import names_of
from etude.schemas import FunctionCall

_ARGUMENTS = "<|tool_call_argument_begin|>"
_IDENTIFIER = re.compile(r"(?:functions\.)?([^\s:]+):[0-9]+")


@ToolParser.register("kimi_k2", "kimi")
class KimiK2ToolParser(HeadedJsonParser):
    """Parser of JSON arguments after `functions.name:number`."""

    opening = ("<|tool_call_begin|>",)
    closing = ("<|tool_call_end|>",)
    glue = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    sections = ("<|tool_calls_section_begin|>",)
    reasoning_tags = (("<think>", "</think>"), ("◁think▷", "◁/think▷"))
    special_tokens = (*opening, *closing, *glue, _ARGUMENTS)
    call_forms = (
        CallForm(f"<|tool_call_begin|>functions.NAME:0{_ARGUMENTS}ARGUMENTS<|tool_call_end|>", glue[0], None, glue[1]),
    )

    head = re.compile(r"([^<]*)<\|tool_call_argument_begin\|>")
    head_form = f"functions.name:0 and {_ARGUMENTS}"
    written = (f"functions.{{name}}:{{number}}{_ARGUMENTS}", "")

    def read_call(self, named: str, arguments: str, tools: Tools | None) -> FunctionCall:
        match = _IDENTIFIER.fullmatch(named.strip())
        if match is None:
            raise Unreadable("the call must be named functions.name:0, with the number of the call")
        name, last = match[1], match[1].rsplit(".", 1)[-1]
        offered = names_of(tools)
        if name not in offered and last in offered:
            name = last
        return function_call(name, decode(arguments)).model_copy(update={"id": match[0]})
