"""The format of Llama 3: `{"name": …, "parameters": {…}}`, alone or after `<|python_tag|>`.

Several calls stand one after the other, apart by `;`. Without the tag the turn must begin with the object; one that has no
name and no parameters is an answer that happens to be JSON. `arguments` is read for `parameters`, as upstream.
"""

from __future__ import annotations

import re

from etude.chat.parsers.bare import BareParser
from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import Block, Found, attempt, skip_space, until
from etude.chat.parsers.json_call import Unreadable, call_of, decode, json_end
from etude.schemas import FunctionCall

_SEPARATOR = re.compile(r"[\s;,]*")
_LIKE_A_CALL = re.compile(r'\s*\{\s*"(?:name|type|function|parameters|arguments)"\s*:')


@ToolParser.register("llama3_json", "llama3")
class Llama3JsonToolParser(BareParser):
    """Parser of JSON calls that nothing closes."""

    opening = ("<|python_tag|>",)
    special_tokens = opening
    stop_tokens = ("<|eom_id|>",)
    bare = _LIKE_A_CALL

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


def _read_call(body: str) -> FunctionCall:
    if not body.startswith("{"):
        raise Unreadable('it must be a JSON object {"name": "...", "parameters": {...}}')
    return call_of(decode(body), arguments=("parameters", "arguments"))


def _after(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return position if match is None else match.end()
