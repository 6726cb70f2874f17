"""The format of Kimi-K2; the identifier of a call holds the function's name.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Beijing"}
<|tool_call_end|><|tool_calls_section_end|>

Of `functions.a.b:0` the name is `a.b`; as in older versions of vLLM it is `b` where only that is a tool on offer.
"""

from __future__ import annotations

import re

from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import Block, BlockParser, Malformed, attempt, skip_space, until
from etude.chat.parsers.json_call import Unreadable, decode, function_call, json_end
from etude.chat.parsers.typed import names_of
from etude.schemas import FunctionCall

_ARGUMENTS = "<|tool_call_argument_begin|>"
_HEAD = re.compile(r"([^<]*)<\|tool_call_argument_begin\|>")
_IDENTIFIER = re.compile(r"(?:functions\.)?([^\s:]+):[0-9]+")


@ToolParser.register("kimi_k2", "kimi")
class KimiK2ToolParser(BlockParser):
    """Parser of JSON arguments after `functions.name:number`."""

    opening = ("<|tool_call_begin|>",)
    closing = ("<|tool_call_end|>",)
    glue = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    sections = ("<|tool_calls_section_begin|>",)
    thoughts = (("<think>", "</think>"), ("◁think▷", "◁/think▷"))
    special_tokens = (*opening, *closing, *glue, _ARGUMENTS)

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_block`."""
        head = _HEAD.match(text, start)
        if head is not None:
            begin = skip_space(text, head.end())
            end = json_end(text, begin)
            after = len(text) if end is None else skip_space(text, end)
            if text.startswith(self.closing[0], after):
                return Block(after + len(self.closing[0]), [attempt(_read_call, head[1], text[begin:end], tools)])
        body, end = until(text, start, self._ends, self.closing)
        if body is None:
            return Block(end, [Malformed(f"it is not closed; end it with {self.closing[0]}")])
        head = _HEAD.match(body)
        if head is None:
            return Block(end, [Malformed(f"it must begin with functions.name:0 and {_ARGUMENTS}")])
        return Block(end, [attempt(_read_call, head[1], body[head.end() :], tools)])


def _read_call(identifier: str, arguments: str, tools: Tools | None) -> FunctionCall:
    match = _IDENTIFIER.fullmatch(identifier.strip())
    if match is None:
        raise Unreadable("the call must be named functions.name:0, with the number of the call")
    name, last = match[1], match[1].rsplit(".", 1)[-1]
    offered = names_of(tools)
    if name not in offered and last in offered:
        name = last
    return function_call(name, decode(arguments)).model_copy(update={"id": match[0]})
