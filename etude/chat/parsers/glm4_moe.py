"""Parser of the format of GLM-4.5 to GLM-4.7, pairs of keys and values:

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Beijing</arg_value>
    </tool_call>

GLM-4.7 writes the same without line breaks. Strings are not quoted: types come from the tool's schema, and an argument that
is not in it is decoded as JSON if possible, as upstream. The template has no end-of-turn token: the model ends a turn with
the first token of the next message, `<|observation|>` after tool calls and `<|user|>` otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from etude.chat.parsers.base import Calls, ToolParser, Tools
from etude.chat.parsers.blocks import Block, BlockParser, Malformed
from etude.chat.parsers.element_call import ElementFormat, write_elements
from etude.chat.parsers.typed import json_or_text, takes_no_text, typed_value


def _value(tag: str, text: str, schemas: Mapping[str, Any]) -> Any:
    key = tag.strip()
    if key not in schemas:
        return json_or_text(text)
    value = typed_value(text, schemas[key])
    written_twice = json_or_text(value) if value == text else None  # JSON encoded twice
    return (
        typed_value(written_twice, schemas[key])
        if isinstance(written_twice, str) and takes_no_text(schemas[key])
        else value
    )


_NAME = re.compile(r"\s*([^\s<]+)\s*(?=<|\Z)")
_ELEMENTS = ElementFormat(
    call=("<tool_call>", "([^<]*)"),
    call_end="</tool_call>",
    argument=("<arg_key>", r"([^<]*)</arg_key>\s*<arg_value>"),
    argument_end="</arg_value>",
    block=("<tool_call>", "</tool_call>"),
    form="<arg_key>key</arg_key><arg_value>value</arg_value>",
    stray=r"\S",
    value=_value,
)


@ToolParser.register("glm4_moe", "glm45", "glm47", "glm")
class Glm4MoeToolParser(BlockParser):
    """Parser of `<arg_key>` and `<arg_value>` pairs in `<tool_call>` tags."""

    opening = ("<tool_call>",)
    closing = ("</tool_call>",)
    glue = ("<|observation|>", "<|user|>")
    special_tokens = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    stop_tokens = ("<|observation|>", "<|user|>")

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        argument = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        return write_elements(calls, "<tool_call>{name}\n", argument, "</tool_call>")

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        name = _NAME.match(text, start)
        call, end = _ELEMENTS.read_call(text, name and name[1], start if name is None else name.end(), tools)
        return Block(end, [call if name else Malformed("the function's name must come first, alone in its line")])
