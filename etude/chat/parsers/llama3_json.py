"""The format of Llama 3: `{"name": …, "parameters": {…}}`, alone or after `<|python_tag|>`.

Several calls stand one after the other, apart by `;`. A turn that begins with such an object is one call or an error. As in
vLLM, objects with a name and parameters among words are calls, too; the words stay content. Any other object is an answer
that happens to be JSON. `arguments` is read for `parameters`.
"""

from __future__ import annotations

import re

from etude.chat.parsers.bare import BareParser
from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import Block, Found, Malformed, Pieces, Thought, attempt, skip_space, until
from etude.chat.parsers.json_call import Unreadable, call_of, decode, json_end, json_reach
from etude.schemas import FunctionCall

_SEPARATOR = re.compile(r"[\s;,]*")
_KEY = r'\{\s*"(?:name|type|function|parameters|arguments)"\s*:'
_LIKE_A_CALL, _AMONG_WORDS = re.compile(r"\s*" + _KEY), re.compile(_KEY)
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]{1,200}"\s*,\s*"(?:parameters|arguments)"\s*:'
)


@ToolParser.register("llama3_json", "llama3")
class Llama3JsonToolParser(BareParser):
    """Parser of JSON calls that nothing closes."""

    opening = ("<|python_tag|>",)
    special_tokens = opening
    stop_tokens = ("<|eom_id|>",)
    bare = _LIKE_A_CALL

    def read(self, text: str, tools: Tools | None = None) -> Pieces:
        """See `BlockParser.read`."""
        return [part for piece in super().read(text, tools) for part in _parts(piece)]

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_block`."""
        found: Found = []
        position = start
        while (end := json_end(text, begin := _after(_SEPARATOR, text, position))) is not None:
            found.append(attempt(_read_call, text[begin:end]))
            position = end
        if found and not _LIKE_A_CALL.match(text, begin):
            return Block(position, found)
        _, end = until(text, position, self._ends, ())
        return Block(end, [*found, attempt(_read_call, text[skip_space(text, begin) : end])])


def _parts(piece: str | FunctionCall | Malformed) -> Pieces:
    """A piece of a turn; words are taken apart at the calls among them."""
    if not isinstance(piece, str) or isinstance(piece, Thought):
        return [piece]
    parts: Pieces = []
    kept = position = 0
    while opening := _AMONG_WORDS.search(piece, position):
        start = opening.start()
        whole, position = json_reach(piece, start)
        if whole and _is_call(piece[start:position]):
            end = position
        elif not whole and _HEAD.match(piece, start):
            end = len(piece)
        else:
            continue
        if not parts or not _SEPARATOR.fullmatch(piece, kept, start):
            parts.append(piece[kept:start])
        parts.append(attempt(_read_call, piece[start:end]))
        kept = position = end
    return [*parts, piece[kept:]]


def _is_call(body: str) -> bool:
    try:
        value = decode(body)
    except Unreadable:
        return _HEAD.match(body) is not None
    return "name" in value and ("parameters" in value or "arguments" in value)


def _read_call(body: str) -> FunctionCall:
    if not body.startswith("{"):
        raise Unreadable('it must be a JSON object {"name": "...", "parameters": {...}}')
    return call_of(decode(body), arguments=("parameters", "arguments"))


def _after(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return position if match is None else match.end()
