"""The format of GLM-4.5 to GLM-4.7, as pairs of keys and values:

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Beijing</arg_value>
    </tool_call>

GLM-4.7 writes the same without line breaks. Texts are not quoted: the tool's schema tells their types, and where it says
nothing a value that is JSON is that JSON, as upstream. The template closes no turn: the model ends one that calls with
`<|observation|>` and one that answers with `<|user|>`, the first token of the message that follows.
"""

from __future__ import annotations

import re

from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import Block, BlockParser, Malformed, attempt, until
from etude.chat.parsers.json_call import Unreadable, function_call
from etude.chat.parsers.typed import json_or_text, properties_of, typed_value
from etude.schemas import FunctionCall

_TAG = re.compile(r"<arg_key>|</arg_key>\s*<arg_value>|</arg_value>")
_KEY, _VALUE_END = "<arg_key>", "</arg_value>"


@ToolParser.register("glm4_moe", "glm45", "glm47", "glm")
class Glm4MoeToolParser(BlockParser):
    """Parser of `<arg_key>` and `<arg_value>` pairs in `<tool_call>` tags."""

    opening = ("<tool_call>",)
    closing = ("</tool_call>",)
    glue = ("<|observation|>", "<|user|>")
    special_tokens = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    stop_tokens = ("<|observation|>", "<|user|>")

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_block`."""
        body, end = until(text, start, self._ends, self.closing)
        if body is None:
            return Block(end, [Malformed("it is not closed; end it with </tool_call>")])
        return Block(end, [attempt(_read_call, body, tools)])


def _read_call(body: str, tools: Tools | None) -> FunctionCall:
    pieces = _TAG.split(body)
    tags = _TAG.findall(body)
    name = pieces[0].strip()
    if not name or any(character.isspace() for character in name):
        raise Unreadable("the function's name must come first, alone in its line")
    schemas = properties_of(tools, name)
    arguments: dict[str, object] = {}
    for number in range(0, len(tags), 3):
        kinds = [tag if tag in (_KEY, _VALUE_END) else "" for tag in tags[number : number + 3]]
        if kinds != [_KEY, "", _VALUE_END] or pieces[number + 3].strip():
            raise Unreadable("write each argument as <arg_key>key</arg_key><arg_value>value</arg_value>")
        key, value = pieces[number + 1].strip(), pieces[number + 2]
        arguments[key] = typed_value(value, schemas[key]) if key in schemas else json_or_text(value)
    return function_call(name, arguments)
