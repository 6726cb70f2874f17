"""Parses calls written as JSON: finds where a JSON text ends, decodes it, and builds a call from it.

Invariant: a `FunctionCall` from here has a name, and arguments that are a JSON object encodable as UTF-8. Nothing is
repaired: invalid JSON raises `Unreadable`, whose message tells the model why.

Linear time: outside strings, JSON has no `<`, no backslash and few letters, so a scan that starts at a tag and reaches
another one stops there. Where two scans of one text overlap, one is inside a string where the other is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from etude.schemas import FunctionCall

EXAMPLE = '{"name": "...", "arguments": {...}}'
SCALARS = r'(?:"[^"\\]{1,40}"\s*:\s*(?:"[^"\\]{0,200}"|[-+.\w]{1,40})\s*,\s*){0,4}'
"""Pattern of up to four leading members of an object whose values are short strings, numbers or words."""
_TO_BRACKET = re.compile(
    r'(?:[\s,:0-9.eE+-]|"[^"\\]*(?:\\.[^"\\]*)*"|true|false|null|NaN|Infinity)*([{}\[\]])', re.DOTALL
)
_STEP = {"{": 1, "[": 1, "}": -1, "]": -1}


class Unreadable(Exception):
    """Text cannot be parsed as a call; the message completes a sentence that is shown to the model."""


def json_end(text: str, start: int) -> int | None:
    """Returns where the JSON object or array at `text[start]` ends; None if there is none, or it does not end."""
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
    """Scans the JSON object at `text[start]`, up to its end or to the first character that is not JSON.

    Returns ((start, end) of all complete objects in it, sorted; starts of incomplete ones; where the scan stopped).
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
    """Decodes a JSON text.

    Raises:
        Unreadable: it is invalid.
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
    """Builds the call of a decoded object; name and arguments are under the first of the given keys that it has.

    Raises:
        Unreadable: it is not an object, or a key is missing or has a value of the wrong type.
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
    """Returns the first of `keys` that `value` has, or None."""
    for key in keys:
        if key in value:
            return key
    return None


def function_call(name: str, arguments: Any) -> FunctionCall:
    """Builds a call of `name`; `arguments` is a dict, or a string with a JSON object.

    Raises:
        Unreadable: it is neither, or has values that JSON cannot represent.
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


def to_json(value: Any) -> str:
    """Writes a value as JSON, with characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def _decoded_or_none(text: str) -> Any:
    try:
        return decode(text)
    except Unreadable:
        return None


def _refuse(constant: str) -> NoReturn:
    raise Unreadable(f"invalid JSON, {constant} is not allowed")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # created once: `json.dumps` creates one per call
