"""`ArgumentChecker`: validates a model's arguments against a tool's JSON Schema.

Invariant: arguments that pass satisfy the schema; any others raise a one-line `ArgumentError` that names the field. Work is
linear in the length of the arguments, whatever the schema's keywords. External references are never fetched.

A string that holds JSON is accepted where the schema wants an object, array, number or boolean. Nothing else is repaired,
and defaults are not filled in: a schema's `default` tells the model what the tool does without the argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator, ValidationError, validators
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.protocols import Validator
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from etude.errors import ConfigError, one_line
from etude.tools.arguments import MAX_SHOWN_CHARS, ArgumentError, decode_json, shortened

_MAX_PATTERN_CHARS = 10_000
_MAX_ERRORS = 100  # of one call that are searched for strings to decode


def _without_null_enums(schema: Any) -> Any:
    """`schema` without `"enum": null`, which the documents' schemas use for "no enumeration"."""
    if isinstance(schema, Mapping):
        kept = {key: value for key, value in schema.items() if key != "enum" or value is not None}
        return {key: _without_null_enums(value) for key, value in kept.items()}
    return [_without_null_enums(item) for item in schema] if isinstance(schema, list) else schema


class ArgumentChecker:
    """One tool's schema, compiled once; arguments that clearly satisfy a simple schema skip the validator."""

    def __init__(self, parameters: Mapping[str, Any], tool_name: str) -> None:
        """`parameters` is the schema of the arguments object.

        Raises:
            ConfigError: it is not a JSON Schema, or has external references; names the tool and the place.
        """
        schema = _without_null_enums(dict(parameters))
        kind = validators.validator_for(schema, default=Draft202012Validator)
        try:
            kind.check_schema(schema)
            _check_references(schema)
            bounded = validators.extend(kind, {"pattern": _pattern, "uniqueItems": _unique_items})
            self._validator: Validator = bounded(schema, registry=Registry())
            next(self._validator.iter_errors({}), None)  # infinite self-reference
            self._plain = _plain_types(schema)
        except SchemaError as error:
            place = ".".join(["parameters", *map(str, error.absolute_path)])
            raise ConfigError(f"tool '{tool_name}': its schema is invalid at {place}: {_message(error)}") from error
        except (Unresolvable, RecursionError, re.error) as error:
            reason = "it refers to itself without end" if isinstance(error, RecursionError) else one_line(error)
            raise ConfigError(f"tool '{tool_name}': its schema cannot be used: {reason}") from error

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """`arguments` as passed to the tool; may be modified in place.

        Raises:
            ArgumentError: they violate the schema; names the field.
        """
        if self._plain is not None and self._plain.holds(arguments):
            return arguments
        try:
            errors = self._errors(arguments)
            while errors and _decode_strings(arguments, errors):
                errors = self._errors(arguments)
        except RecursionError:
            raise ArgumentError("the arguments are nested too deeply") from None
        if errors:
            raise ArgumentError(_error_message(best_match(errors)), "invalid_arguments")
        return arguments

    def _errors(self, arguments: dict[str, Any]) -> list[ValidationError]:
        return [error for error, _ in zip(self._validator.iter_errors(arguments), range(_MAX_ERRORS))]


class _PlainTypes(NamedTuple):
    """A schema that only gives the types of its properties: the common case, at a tenth of the cost."""

    types: dict[str, tuple[type, ...]]
    required: frozenset[str]
    open: bool  # whether other properties are allowed

    def holds(self, arguments: dict[str, Any]) -> bool:
        """True only if the validator would find no error; False is inconclusive."""
        types = self.types
        for name, value in arguments.items():
            allowed = types.get(name)
            if allowed is None:
                if not self.open:
                    return False
            elif type(value) not in allowed:
                return False
        return self.required <= arguments.keys()


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_ANNOTATIONS = {"description", "title", "default", "examples", "$comment"}


def _plain_types(schema: Mapping[str, Any]) -> _PlainTypes | None:
    """The schema as a map of types; None if it has other constraints."""
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    known = {"type", "properties", "required", "additionalProperties"}
    if schema.keys() - known - _ANNOTATIONS or schema.get("type") != "object" or not isinstance(others, bool):
        return None
    types = {}
    for name, described in properties.items():
        if not isinstance(described, Mapping) or described.keys() - {"type"} - _ANNOTATIONS:
            return None
        if not isinstance(described.get("type"), str):
            return None
        types[name] = _TYPES[described["type"]]
    return _PlainTypes(types, frozenset(schema.get("required", ())), others)


def _decode_strings(arguments: dict[str, Any], errors: list[ValidationError]) -> bool:
    """Decodes strings in place where the schema wants another type; returns whether any was decoded."""
    changed = False
    for error in errors:
        if error.validator not in ("type", "anyOf", "oneOf", "enum", "const") or not isinstance(error.instance, str):
            continue
        path = list(error.absolute_path)
        if not path:
            continue
        try:
            value = decode_json(error.instance)
        except ArgumentError:
            continue
        if isinstance(value, str):
            continue
        holder: Any = arguments
        for key in path[:-1]:
            holder = holder[key]
        if isinstance(holder[path[-1]], str):
            holder[path[-1]] = value
            changed = True
    return changed


def _error_message(error: ValidationError) -> str:
    field = _place(error)
    return f"{field}: {_message(error)}" if field else _message(error)


def _place(error: ValidationError) -> str:
    """`items[0].name`; empty for the arguments object itself."""
    text = ""
    for part in error.absolute_path:
        text += f"[{part}]" if isinstance(part, int) else f".{shortened(part)}" if text else shortened(part)
    return repr(text) if text else ""


def _message(error: ValidationError | SchemaError) -> str:
    """The validator's message, with the value in it shortened."""
    shown = repr(error.instance)
    message = error.message
    if len(shown) > MAX_SHOWN_CHARS:
        message = message.replace(shown, shortened(shown), 1)
    return one_line(ValueError(message))


def _check_references(schema: dict[str, Any]) -> None:
    """Raises Unresolvable for a dangling `$ref`; nothing is ever fetched."""
    resolver = (
        Registry().with_resource("", Resource.from_contents(schema, default_specification=DRAFT202012)).resolver()
    )
    for reference in _references(schema):
        resolver.lookup(reference)


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _pattern(validator: Validator, pattern: str, instance: object, schema: object) -> Iterator[ValidationError]:
    """`pattern` on strings of bounded length, since the cost of a regular expression is not."""
    if isinstance(instance, str):
        if len(instance) > _MAX_PATTERN_CHARS:
            yield ValidationError(f"{instance!r} is longer than the {_MAX_PATTERN_CHARS} characters of a pattern")
        elif not re.search(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _unique_items(validator: Validator, wanted: bool, instance: object, schema: object) -> Iterator[ValidationError]:
    """`uniqueItems` in linear time; the library's own compares every pair of objects."""
    if wanted and isinstance(instance, list):
        texts = {json.dumps(_as_json_compares(item), sort_keys=True) for item in instance}
        if len(texts) != len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")


def _as_json_compares(value: Any) -> Any:
    """`value` with 1.0 written as 1, since JSON Schema treats them as equal; true stays distinct from 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_as_json_compares(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_json_compares(item) for key, item in value.items()}
    return value
