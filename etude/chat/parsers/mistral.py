"""Parser of the formats of Mistral's models, with reasoning in `[THINK]`:

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Beijing"}}, …]
    [TOOL_CALLS]get_weather{"city": "Beijing"}
    [TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Beijing"}

Tokenizers up to version 7 use the first one, later ones (from version 11) the others. Several calls may follow one tag.
"""

from __future__ import annotations

import re

from etude.chat.grammar import CallForm
from etude.chat.parsers.base import Calls, ToolParser, Tools
from etude.chat.parsers.blocks import Block, BlockParser, Found, attempt, read_each, skip_space, until
from etude.chat.parsers.json_call import Unreadable, call_of, decode, function_call, json_end, to_json
from etude.schemas import FunctionCall

_HEAD = re.compile(r"[\s,]*([\w.-]+)\s*(?:\[CALL_ID\](\w*))?\s*(?:\[ARGS\])?(?=\s*\{)")

_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")


@ToolParser.register("mistral")
class MistralToolParser(BlockParser):
    """Parser of calls after `[TOOL_CALLS]`."""

    opening = ("[TOOL_CALLS]",)
    reasoning_tags = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
    special_tokens = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")
    call_forms = (
        CallForm("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", between=""),
        CallForm('{"name": "NAME", "arguments": ARGUMENTS}', "[TOOL_CALLS][", ", ", "]"),
    )

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        return f"[TOOL_CALLS]{to_json([{'name': name, 'arguments': dict(given)} for name, given in calls])}"

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        begin = skip_space(text, start)
        if text.startswith(("[", "{"), begin) and not text.startswith(self.opening[0], begin):
            end = json_end(text, begin)
            if end is not None:
                return Block(end, read_each(text[begin:end], _call_of_object))
        found: Found = []
        position = start
        while named := _HEAD.match(text, position):
            begin = skip_space(text, named.end())
            end = json_end(text, begin)
            if end is None:
                break
            found.append(attempt(_call_of_name, named[1], text[begin:end], named[2]))
            position = end
        if found and not named:
            return Block(position, found)
        _, end = until(text, position, self._ends, ())
        return Block(end, [*found, attempt(_unreadable, text[position:end])])


def _call_of_object(value: object) -> FunctionCall:
    call = call_of(value, arguments=("arguments", "parameters"))
    return _with_id(call, value.get("id")) if isinstance(value, dict) else call


def _call_of_name(name: str, arguments: str, identifier: str | None) -> FunctionCall:
    return _with_id(function_call(name, decode(arguments)), identifier)


def _with_id(call: FunctionCall, identifier: object) -> FunctionCall:
    """Adds the call's id, if it is one that Mistral's templates accept in messages."""
    fits = isinstance(identifier, str) and _CALL_ID.fullmatch(identifier) is not None
    return call.model_copy(update={"id": identifier}) if fits else call


def _unreadable(body: str) -> FunctionCall:
    if body.lstrip().startswith(("[", "{")):
        decode(body)
    raise Unreadable('it must be a name and its JSON arguments, or a JSON list of {"name": ..., "arguments": {...}}')
