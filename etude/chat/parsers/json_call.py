"""Calls written as JSON: where a JSON text ends, what it holds, and how a call is made of it.

Invariant: a `FunctionCall` from here has a name and arguments that are the JSON of one object, in characters that every
tokenizer takes. Nothing is repaired: invalid JSON is `Unreadable`, whose text tells the model why.

Linear time: outside its strings JSON has no `<`, no backslash and few letters, so a reader that begins at a tag and runs
into another one stops there. Where two readings of one text overlap, one is inside a string where the other is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from etude.schemas import FunctionCall

EXAMPLE = '{"name": "...", "arguments": {...}}'
SCALARS = r'(?:"[^"\\]{1,40}"\s*:\s*(?:"[^"\\]{0,200}"|[-+.\w]{1,40})\s*,\s*){0,4}'
"""Pattern of the first members of an object, as far as they are texts, numbers or words, few and short."""
_TO_BRACKET = re.compile(
    r'(?:[\s,:0-9.eE+-]|"[^"\\]*(?:\\.[^"\\]*)*"|true|false|null|NaN|Infinity)*([{}\[\]])', re.DOTALL
)
_STEP = {"{": 1, "[": 1, "}": -1, "]": -1}


class Unreadable(Exception):
    """Something is not a call; the message says why, in a part of a sentence for the model."""


def json_end(text: str, start: int) -> int | None:
    """Where the object or array that begins at `text[start]` ends; None if it is none, or does not end."""
    if text[start : start + 1] not in ("{", "["):
        return None
    depth, position = 0, start
    while bracket := _TO_BRACKET.match(text, position):
        position = bracket.end()
        depth += _STEP[bracket[1]]
        if depth == 0:
            return position
    return None


def json_objects(text: str, start: int) -> tuple[list[tuple[int, int]], list[int], int]:
    """What stands in the JSON that begins with an object at `text[start]`, and ends with it or where it is none any more.

    That is (the objects that end, by where they begin, where those begin that do not, where reading stopped).
    """
    whole: list[tuple[int, int]] = []
    opened: list[int] = []
    position = start
    while bracket := _TO_BRACKET.match(text, position):
        position = bracket.end()
        if _STEP[bracket[1]] > 0:
            opened.append(position - 1)
            continue
        begin = opened.pop()
        if text[begin] == "{":
            whole.append((begin, position))
        if not opened:
            break
    return sorted(whole), [begin for begin in opened if text[begin] == "{"], position


def decode(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        Unreadable: it is none.
    """
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Unreadable(f"invalid JSON, {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise Unreadable("invalid JSON, it is nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise Unreadable("invalid JSON, a number is out of range") from None


def call_of(value: Any, names: Sequence[str] = ("name",), arguments: Sequence[str] = ("arguments",)) -> FunctionCall:
    """The call in a decoded object; its name and its arguments stand under the first of the given keys that it has.

    Raises:
        Unreadable: it is no object, or a key is missing or holds something else.
    """
    if not isinstance(value, dict):
        raise Unreadable(
            f"it must hold one JSON object {EXAMPLE.replace('name', names[0]).replace('arguments', arguments[0])}"
        )
    name = value.get(_first(names, value))
    if not isinstance(name, str) or not name.strip():
        raise Unreadable(f'"{names[0]}" is missing or is not a string')
    key = _first(arguments, value)
    if key is None:
        raise Unreadable(f'"{arguments[0]}" is missing; write "{arguments[0]}": {{}} for none')
    return function_call(name.strip(), value[key])


def _first(keys: Sequence[str], value: dict[str, Any]) -> str | None:
    """The first of `keys` that `value` has."""
    for key in keys:
        if key in value:
            return key
    return None


def function_call(name: str, arguments: Any) -> FunctionCall:
    """A call of `name`; `arguments` are an object, or a text that holds one.

    Raises:
        Unreadable: they are neither, or hold what JSON cannot say.
    """
    if isinstance(arguments, str):
        arguments = _decoded_or_none(arguments)
    if not isinstance(arguments, dict):
        raise Unreadable('"arguments" must be a JSON object')
    try:
        encoded = _ENCODER.encode(arguments)
        (name + encoded).encode("utf-8")
    except UnicodeEncodeError:
        raise Unreadable("invalid JSON, half of a surrogate pair is not a character") from None
    except RecursionError:
        raise Unreadable("invalid JSON, it is nested too deeply") from None
    except (ValueError, TypeError):  # 1e999 decodes to infinity
        raise Unreadable("invalid JSON, a number is out of range") from None
    return FunctionCall(name=name, arguments=encoded)


def _decoded_or_none(text: str) -> Any:
    try:
        return decode(text)
    except Unreadable:
        return None


def _refuse(constant: str) -> NoReturn:
    raise Unreadable(f"invalid JSON, {constant} is not allowed")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # made once: `json.dumps` makes one a call
