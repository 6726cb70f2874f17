"""Parser of Llama 3's format: `{"name": …, "parameters": {…}}`, alone or after `<|python_tag|>`.

Several calls are separated by `;`. A turn that begins with such an object is a call or an error. As in vLLM, objects with a
name and parameters inside content are calls, too, with keys in any order; the text around them stays content. Any other
object is content that happens to be JSON, including everything in it. `arguments` is accepted instead of `parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from etude.chat.grammar import CallForm
from etude.chat.parsers.base import Calls, ToolParser, Tools
from etude.chat.parsers.blocks import BareParser, Block, Found, Pieces, Thought, any_of, attempt, skip_space, until
from etude.chat.parsers.json_call import SCALARS, Unreadable, call_of, decode, json_end, json_objects, to_json
from etude.schemas import FunctionCall

_TAG, _BRACE = "<|python_tag|>", "{"
_TAGGED = any_of(_TAG)
_NEXT = any_of(_TAG, *(tag for pair in BareParser.reasoning_tags for tag in pair))
_SEPARATOR = re.compile(r"[\s;,]*")
_LIKE_A_CALL = re.compile(r'\s*\{\s*"(?:name|type|function|parameters|arguments)"\s*:')
_HEAD = re.compile(rf'\{{\s*{SCALARS}"name"\s*:\s*"[^"\\]{{1,200}}"\s*,\s*{SCALARS}"(?:parameters|arguments)"\s*:')


@ToolParser.register("llama3_json", "llama3")
class Llama3JsonToolParser(BareParser):
    """Parser of JSON calls without a closing tag."""

    opening = (_TAG, _BRACE)
    special_tokens = (_TAG,)
    stop_tokens = ("<|eom_id|>",)
    call_forms = (CallForm('{"name": "NAME", "parameters": ARGUMENTS}'),)
    bare = _LIKE_A_CALL

    def write(self, calls: Calls, tools: Tools | None = None) -> str:
        return "; ".join(to_json({"name": name, "parameters": dict(arguments)}) for name, arguments in calls)

    def read_pieces(self, text: str, tools: Tools | None, closing_of: Mapping[str, str]) -> Pieces:
        """See `BlockParser.read_pieces`; separators between calls are dropped."""
        pieces: Pieces = []
        waiting: Pieces = []
        for piece in super().read_pieces(text, tools, closing_of):
            if not isinstance(piece, str):
                pieces.append(piece)
                waiting = []
            elif pieces and not isinstance(pieces[-1], str) and _separates(piece):
                waiting.append(piece)
            else:
                pieces += [*waiting, piece]
                waiting = []
        return [*pieces, *waiting]

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        if tag == _BRACE:
            return self._read_among_words(text, start - len(tag))
        found: Found = []
        position = start
        while (end := json_end(text, begin := _after(_SEPARATOR, text, position))) is not None:
            found.append(attempt(_read_call, text[begin:end]))
            position = end
        if found and not _LIKE_A_CALL.match(text, begin):
            return Block(position, found)
        _, end = until(text, position, _TAGGED, ())
        return Block(end, [*found, attempt(_read_call, text[skip_space(text, begin) : end])])

    def _read_among_words(self, text: str, start: int) -> Block:
        """Parses the object at `start` inside content. What is inside a valid JSON object is not searched for calls; if it
        is not valid JSON, for example because of doubled braces, objects in it that begin like calls are parsed."""
        whole, unfinished, end = json_objects(text, start)
        cut = next((begin for begin in unfinished if _HEAD.match(text, begin)), None)
        pieces: Pieces = []
        position = outside = start
        for begin, close in whole:
            if begin < position or (cut is not None and begin >= cut):
                continue
            value = None  # inside an invalid object, only the head is checked, so that each text is decoded once
            if begin >= outside:
                value, outside = _object_or_none(text[begin:close]), close
            if _HEAD.match(text, begin) is not None if value is None else _is_call(value):
                pieces += [text[position:begin], attempt(_read_call, text[begin:close])]
                position = close
            elif value is not None:
                pieces.append(text[position:close])
                position = close
        if cut is None:
            return Block(end, [*pieces, text[position:end]])
        _, end = until(text, end, _NEXT, ())
        return Block(end, [*pieces, text[position:cut], attempt(_read_call, text[cut:end])])


def _separates(piece: str) -> bool:
    return not isinstance(piece, Thought) and _SEPARATOR.fullmatch(piece) is not None


def _object_or_none(body: str) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = decode(body)
    except Unreadable:
        return None
    return value


def _is_call(value: Mapping[str, Any]) -> bool:
    return "name" in value and ("parameters" in value or "arguments" in value)


def _read_call(body: str) -> FunctionCall:
    if not body.startswith("{"):
        raise Unreadable('it must be a JSON object {"name": "...", "parameters": {...}}')
    return call_of(decode(body), arguments=("parameters", "arguments"))


def _after(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return position if match is None else match.end()
