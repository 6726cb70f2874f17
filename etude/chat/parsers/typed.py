"""Converts arguments that a format writes as unquoted text, according to the tool's schema.

Invariant: no text is lost: text that is not a value of a type that the schema allows stays a string, so that argument
validation can report what is wrong. As in vLLM, `null` and `None` are null where no string is allowed, `True` and `False`
are case-insensitive, and an object or a list may be a Python literal. Nothing is evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from etude.chat.parsers.base import Tools
from etude.chat.parsers.json_call import Unreadable, decode
from etude.chat.parsers.literal import parse_expression, read_literal

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
    """Converts `text` to a value that `schema` allows; returns `text` if that is not possible, or the schema has no type."""
    kinds = _types(schema)
    if not kinds or kinds == {"string"}:
        return text
    word = text.strip().lower()
    if word in _NULLS and takes_null(schema):
        return None
    try:
        value = _value(word if word in _BOOLEANS else text, kinds)
    except (Unreadable, RecursionError):
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
    except Unreadable:
        if "string" in kinds or not kinds & {"array", "object"}:
            raise
    return read_literal(parse_expression(text.strip()))


def json_or_text(text: str) -> Any:
    """Decodes `text` as JSON, or returns it unchanged; for formats without quotes when there is no schema."""
    try:
        return decode(text)
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
