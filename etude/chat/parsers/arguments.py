"""Parses the arguments of calls: JSON, Python literals, and unquoted text that is typed by the tool's schema.

Invariant: a `FunctionCall` from here has a name, and arguments that are a JSON object encodable as UTF-8. Nothing is
repaired and nothing is evaluated: what cannot be parsed raises `Unreadable`, whose message tells the model why. No unquoted
text is lost: text that is not a value of a type that the schema allows stays a string, so that argument validation can
report what is wrong.

Linear time: outside strings, JSON has no `<`, no backslash and few letters, so a scan that starts at a tag and reaches
another one stops there. Where two scans of one text overlap, one is inside a string where the other is not.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from etude.chat.parsers.base import Tools
from etude.jsonl import RepeatedKeyError, decode_strictly, unique_keys
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


class Ambiguous(Unreadable):
    """It can be parsed, but a key is given twice."""


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
        Ambiguous: a key is given twice.
        Unreadable: it is invalid.
    """
    try:
        return decode_strictly(text)
    except RepeatedKeyError as error:
        raise Ambiguous(str(error)) from None
    except ValueError as error:
        raise Unreadable(f"invalid JSON, {error}") from None


def as_object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of its members.

    Raises:
        Ambiguous: a key is given twice.
    """
    try:
        return unique_keys(pairs)
    except RepeatedKeyError as error:
        raise Ambiguous(str(error)) from None


def call_of(value: Any, names: Sequence[str] = ("name",), arguments: Sequence[str] = ("arguments",)) -> FunctionCall:
    """Builds the call of a decoded object; name and arguments are under the first of the given keys that it has.

    Raises:
        Unreadable: it is not an object, or a key is missing or has a value of the wrong type.
    """
    if not isinstance(value, dict):
        raise Unreadable(
            f"it must hold one JSON object {EXAMPLE.replace('name', names[0]).replace('arguments', arguments[0])}"
        )
    name = next((value[key] for key in names if key in value), None)
    if not isinstance(name, str) or not name.strip():
        raise Unreadable(f'"{names[0]}" is missing or is not a string')
    key = next((key for key in arguments if key in value), None)
    if key is None:
        raise Unreadable(f'"{arguments[0]}" is missing; write "{arguments[0]}": {{}} for none')
    return function_call(name.strip(), value[key])


def function_call(name: str, arguments: Any) -> FunctionCall:
    """Builds a call of `name`; `arguments` is a dict, or a string with a JSON object.

    Raises:
        Unreadable: it is neither, or has values that JSON cannot represent.
    """
    if isinstance(arguments, str):
        arguments = json_or_text(arguments)
    if not isinstance(arguments, dict):
        raise Unreadable('"arguments" must be a JSON object')
    try:
        encoded = _ENCODER.encode(arguments)
        (name + encoded).encode("utf-8")
    except UnicodeEncodeError:
        raise Unreadable("invalid JSON, half of a surrogate pair is not a character") from None
    except RecursionError:
        raise Unreadable("invalid JSON, it is nested too deeply") from None
    except (ValueError, TypeError):  # 1e999 is infinity in Python
        raise Unreadable("invalid JSON, a number is out of range") from None
    return FunctionCall(name=name, arguments=encoded)


def to_json(value: Any) -> str:
    """Writes a value as JSON, with characters as they are."""
    return json.dumps(value, ensure_ascii=False)


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # created once: `json.dumps` creates one per call


# -- Python literals, parsed with Python's own parser; JSON's names are accepted, too

MAX_CHARS = 100_000  # Python's parser is not hardened against hostile text
_JSON_NAMES = {"true": True, "false": False, "null": None}


def parse_expression(text: str) -> ast.expr:
    """Parses one Python expression to a syntax tree.

    Raises:
        Unreadable: it is invalid, or longer than `MAX_CHARS` characters.
    """
    if len(text) > MAX_CHARS:
        raise Unreadable(f"it is longer than {MAX_CHARS} characters")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable('it is not valid Python; write [name(key="value")]') from None


def read_literal(node: ast.expr) -> object:
    """Converts the syntax tree of a literal to its value.

    Raises:
        Unreadable: it is not a literal.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return [read_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        keys = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
        return as_object(zip(keys, map(read_literal, node.values)))
    raise Unreadable("a value must be a literal: a text, number, list or dict")


# -- unquoted text. As in vLLM, `null` and `None` are null where no string is allowed, `True` and `False` are
# case-insensitive, and an object or a list may be a Python literal.

_KINDS: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
_NULLS, _BOOLEANS = {"null", "none"}, {"true", "false"}


def names_of(tools: Tools | None) -> set[str]:
    """Returns the names of the available tools."""
    return {function["name"] for function in _functions(tools) if isinstance(function.get("name"), str)}


def properties_of(tools: Tools | None, name: str) -> dict[str, Any]:
    """Returns the argument schemas of the tool `name`; empty if it is unknown or has none."""
    for function in _functions(tools):
        if function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return dict(properties) if isinstance(properties, Mapping) else {}
    return {}


def _functions(tools: Tools | None) -> Iterator[Mapping[str, Any]]:
    for tool in tools or ():
        if isinstance(tool, BaseModel):  # an `OpenAIFunctionToolSchema`
            tool = tool.model_dump(exclude_unset=True)
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping):
            yield function


def typed_value(text: str, schema: object) -> Any:
    """Converts `text` to a value that `schema` allows; returns `text` if that is not possible, or the schema has no type.

    Raises:
        Ambiguous: no string is allowed, and a key is given twice.
    """
    kinds = _types(schema)
    if not kinds or kinds == {"string"}:
        return text
    word = text.strip().lower()
    if word in _NULLS and takes_null(schema):
        return None
    try:
        value = _value(word if word in _BOOLEANS else text, kinds)
    except (Unreadable, RecursionError) as error:
        if isinstance(error, Ambiguous) and "string" not in kinds:
            raise
        return text
    return value if any(_has_type(value, kind) for kind in kinds) else text


def takes_null(schema: object) -> bool:
    """Whether an unquoted `null` is null under `schema`, that is, the schema allows null or no string."""
    kinds = _types(schema)
    return "null" in kinds or "string" not in kinds


def takes_no_text(schema: object) -> bool:
    """Whether `schema` has types and does not allow strings."""
    kinds = _types(schema)
    return bool(kinds) and "string" not in kinds


def inner_schema(schema: object, key: str | None = None) -> object:
    """Returns the schema of an object's member `key`, or of a list's items; None if `schema` has none."""
    if not isinstance(schema, Mapping):
        return None
    if key is None:
        return schema.get("items")
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def _value(text: str, kinds: set[str]) -> Any:
    """Decodes `text` as JSON or, if it must be an object or a list, as a Python literal."""
    try:
        return decode(text)
    except Unreadable as error:
        if isinstance(error, Ambiguous) or "string" in kinds or not kinds & {"array", "object"}:
            raise
    return read_literal(parse_expression(text.strip()))


def json_or_text(text: str) -> Any:
    """Decodes `text` as JSON, or returns it unchanged; for formats without quotes when there is no schema.

    Raises:
        Ambiguous: it is JSON in which a key is given twice.
    """
    try:
        return decode(text)
    except Ambiguous:
        raise
    except Unreadable:
        return text


def _types(schema: object) -> set[str]:
    """Returns the JSON types that a schema allows, from `type`, `enum`, `const`, `anyOf`, `oneOf` or `allOf`."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    found = {kind for kind in (declared, *_as_list(declared)) if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        for branch in _as_list(schema.get(key)):
            found |= _types(branch)
    for branch in _as_list(schema.get("allOf")):
        kinds = _types(branch)
        found = found & kinds or kinds or found
    if not found:
        values = _as_list(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
        found = {kind for value in values for kind in ("string", *_KINDS) if _has_type(value, kind)}
    return found


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _has_type(value: object, kind: str) -> bool:
    if kind == "string":
        return isinstance(value, str)
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return kind == "boolean" and isinstance(value, bool)
    return kind in _KINDS and isinstance(value, _KINDS[kind])
