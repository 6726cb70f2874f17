"""The arguments of a tool call: `decode_arguments` parses the model's text, `ArgumentChecker` validates them by the schema.

Invariant: decoded arguments are a JSON object of bounded depth, with finite numbers, encodable text and no duplicate keys;
checked arguments satisfy the tool's JSON Schema. Anything else raises a one-line `ArgumentError` that names the field. A
check takes about `MAX_SECONDS` of CPU at most: arguments may be hostile, and so may the schema of an MCP server's tool.
External references are never fetched.

An arguments object encoded as a JSON string is accepted, as models write that too, and so is a string that contains JSON
where the schema expects an object, array, number or boolean. Nothing else is repaired, and defaults are not filled in: a
schema's `default` describes what the tool does without the argument.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import regex
from jsonschema import Draft202012Validator, ValidationError, validators
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.protocols import Validator
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from etude.errors import ConfigError, one_line
from etude.jsonl import decode_strictly

MAX_DEPTH = 100
_MAX_SHOWN_CHARS = 80
MAX_SECONDS = 1.0
_PATTERN_SECONDS = 0.1
_MAX_ERRORS = 100  # errors per call that are searched for strings to decode


_Keyword = Callable[..., "Iterator[ValidationError] | None"]


class _TooLongError(Exception):
    """A check exceeds its CPU time."""


class ArgumentError(ValueError):
    """The arguments of a call are invalid; the message goes to the model, and `word` is the `error` of the call's record."""

    def __init__(self, text: str, word: str = "malformed") -> None:
        super().__init__(text)
        self.word = word


def decode_arguments(text: str) -> dict[str, Any]:
    """Parses `text` as a JSON object, or as a JSON string that contains one.

    Raises:
        ArgumentError: `text` is neither.
    """
    arguments = _decode(text)
    if isinstance(arguments, str):
        arguments = _decode(arguments)
    if not isinstance(arguments, dict):
        raise ArgumentError('the arguments must be a JSON object such as {"name": "value"}')
    return arguments


def _decode(text: str) -> Any:
    """Parses `text` as JSON; raises ArgumentError if it is invalid, too deep or not encodable as UTF-8."""
    try:
        value = decode_strictly(text)
    except ValueError as error:
        raise ArgumentError(f"the arguments are not valid JSON ({one_line(error)})") from None
    if _is_deep(value):
        raise ArgumentError(f"the arguments are nested deeper than {MAX_DEPTH} levels")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"the arguments hold {error.object[error.start]!a}, which is no character") from None
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return False
    return True


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def _without_null_enums(schema: Any) -> Any:
    """Returns `schema` without any `"enum": null`, which some schemas write for "no enumeration"."""
    if isinstance(schema, Mapping):
        kept = {key: value for key, value in schema.items() if key != "enum" or value is not None}
        return {key: _without_null_enums(value) for key, value in kept.items()}
    return [_without_null_enums(item) for item in schema] if isinstance(schema, list) else schema


class ArgumentChecker:
    """Validates arguments against the schema of one tool, compiled once."""

    def __init__(self, parameters: Mapping[str, Any], tool_name: str) -> None:
        """`parameters` is the schema of the arguments object.

        Raises:
            ConfigError: `parameters` is not a JSON Schema, or has external references; names the tool and the place.
        """
        self._deadline = time.thread_time() + MAX_SECONDS
        try:
            schema = _without_null_enums(dict(parameters))
            kind = validators.validator_for(schema, default=Draft202012Validator)
            kind.check_schema(schema)
            _check_references(schema)
            keywords = {**kind.VALIDATORS, **_own_keywords(kind.VALIDATORS, "patternProperties" in json.dumps(schema))}
            timed = {name: self._timed(keyword) for name, keyword in keywords.items()}
            self._validator: Validator = validators.extend(kind, timed)(schema, registry=Registry())
            next(self._validator.iter_errors({}), None)  # fails here if the schema refers to itself without end
        except _TooLongError as error:
            raise ConfigError(f"tool '{tool_name}': its schema cannot be used: {error}") from error
        except SchemaError as error:
            place = ".".join(["parameters", *map(str, error.absolute_path)])
            raise ConfigError(f"tool '{tool_name}': its schema is invalid at {place}: {_message(error)}") from error
        except (Unresolvable, RecursionError, re.error, OverflowError) as error:
            reason = "it refers to itself without end" if isinstance(error, RecursionError) else one_line(error)
            raise ConfigError(f"tool '{tool_name}': its schema cannot be used: {reason}") from error

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Validates `arguments` and returns them, with strings that contain JSON decoded in place where the schema needs it.

        Raises:
            ArgumentError: the arguments violate the schema, or checking them takes too long; names the field.
        """
        self._deadline = time.thread_time() + MAX_SECONDS
        try:
            while errors := [*islice(self._validator.iter_errors(arguments), _MAX_ERRORS)]:
                if not _decode_strings(arguments, errors):
                    break
        except RecursionError:
            raise ArgumentError("the arguments are nested too deeply") from None
        except _TooLongError as error:
            raise ArgumentError(f"the arguments cannot be checked: {error}", "invalid_arguments") from None
        if errors:
            worst = best_match(errors)
            place = worst.json_path.removeprefix("$").removeprefix(".")  # `items[0].name`; empty: the object itself
            raise ArgumentError(f"{_truncate(place)!r}: " * bool(place) + _message(worst), "invalid_arguments")
        return arguments

    def _timed(self, keyword: _Keyword) -> _Keyword:
        """Returns `keyword` with the deadline of the check: references that refer to references twice take 2ⁿ steps."""

        def check(validator: Validator, value: Any, instance: object, schema: Any) -> Iterator[ValidationError]:
            if time.thread_time() > self._deadline:
                raise _TooLongError(f"comparing them with the tool's schema takes more than {MAX_SECONDS:g} s")
            return keyword(validator, value, instance, schema) or iter(())

        return check


def _decode_strings(arguments: dict[str, Any], errors: list[ValidationError]) -> bool:
    """Decodes strings in place where the schema expects another type; returns whether any was decoded."""
    changed = False
    for error in errors:
        if error.validator not in ("type", "anyOf", "oneOf", "enum", "const") or not isinstance(error.instance, str):
            continue
        path = list(error.absolute_path)
        if not path:
            continue
        try:
            value = _decode(error.instance)
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


def _message(error: ValidationError | SchemaError) -> str:
    """Returns the validator's message with the value in it truncated."""
    shown = repr(error.instance)
    message = error.message
    if len(shown) > _MAX_SHOWN_CHARS:
        message = message.replace(shown, _truncate(shown), 1)
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


def _matches(pattern: str, text: str) -> bool:
    """Whether `pattern` is found in `text`; a search that takes too long finds nothing."""
    try:
        return regex.search(pattern, text, timeout=_PATTERN_SECONDS) is not None
    except (TimeoutError, regex.error):
        return False


def _pattern(validator: Validator, pattern: str, instance: object, schema: object) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: object, schema: object
) -> Iterator[ValidationError]:
    for key, value in instance.items() if isinstance(instance, dict) else ():
        for pattern in patterns:
            if _matches(pattern, key):
                yield from validator.descend(value, patterns[pattern], path=key, schema_path=pattern)


def _own_keywords(library: Mapping[str, _Keyword], has_patterns: bool) -> dict[str, _Keyword]:
    """Returns the keywords whose cost is unbounded in the library: it searches with `re` and compares all pairs of items."""

    def additional(validator: Validator, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        if isinstance(instance, dict):
            extra = {key: instance[key] for key in instance if key not in known}
            extra = {key: extra[key] for key in extra if not any(_matches(pattern, key) for pattern in patterns)}
            yield from library["additionalProperties"](validator, value, extra, {}) or ()

    def unevaluated(validator: Validator, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError] | None:
        return iter(()) if has_patterns else library["unevaluatedProperties"](validator, value, instance, schema)

    own: dict[str, _Keyword] = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": additional,
        "unevaluatedProperties": unevaluated,
        "uniqueItems": _unique_items,
    }
    return {name: keyword for name, keyword in own.items() if name in library}


def _unique_items(validator: Validator, wanted: bool, instance: object, schema: object) -> Iterator[ValidationError]:
    """The keyword `uniqueItems` in linear time; the library's version compares every pair of objects."""
    if wanted and isinstance(instance, list):
        texts = {json.dumps(_normalize_number(item), sort_keys=True) for item in instance}
        if len(texts) != len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")


def _normalize_number(value: Any) -> Any:
    """Returns `value` with 1.0 replaced by 1, which JSON Schema treats as equal; true stays distinct from 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normalize_number(item) for item in value]
    if isinstance(value, dict):
        return {key: _normalize_number(item) for key, item in value.items()}
    return value
