"""A section's values against its declaration: what does not fit, each with its key and what is allowed, all at once.

Invariant: `build` returns an instance whatever is wrong, with defaults in place of what is, so that further checks can be
made; nothing is guessed (no text becomes a boolean, no fraction a whole number).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import pydantic

from etude.errors import raise_faults
from etude.options.declare import problems

T = TypeVar("T")


def to_options(cls: type[T], section: Mapping[str, Any], key_prefix: str = "") -> T:
    """`section` as an instance of the declared section `cls`, whose own key is `key_prefix`.

    Raises:
        ConfigError: names every key that is unknown, or whose value does not fit.
    """
    made, found = build(cls, section, f"{key_prefix}." if key_prefix else "")
    raise_faults(list(found.values()))
    return made


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> tuple[T, dict[str, str]]:
    """(an instance, what is wrong by dotted key); the instance has defaults in place of what is wrong."""
    values, found = _copy(values), dict[str, str]()
    while True:
        try:
            return cls.__pydantic_validator__.validate_python(values), found  # type: ignore[attr-defined]
        except pydantic.ValidationError as error:
            wrong = problems(cls, error, values, prefix)
            found |= {name: text for name, text in wrong.items() if name not in found}
            for name in wrong:
                _remove(values, name.removeprefix(prefix))


def _copy(values: Any) -> Any:
    """Sections may lose keys here; the caller's do not."""
    return {name: _copy(value) for name, value in values.items()} if isinstance(values, Mapping) else values


def _remove(values: Any, name: str) -> None:
    if not name:  # the section itself is wrong
        values.clear()
    *sections, last = name.split(".")
    for part in sections:
        values = values[part]
    values.pop(last, None)


def plain(options: Any) -> dict[str, Any]:
    """A section as YAML has it: nested dictionaries, lists for tuples."""
    return {
        each.name: plain(value)
        if dataclasses.is_dataclass(value)
        else list(value)
        if isinstance(value, tuple)
        else value
        for each in dataclasses.fields(options)
        for value in [getattr(options, each.name)]
    }


def value_of(options: Any, key: str) -> Any:
    """The value of a dotted key, or its section."""
    for name in key.split(".") if key else ():
        options = getattr(options, name)
    return options


def yaml_text(value: Any) -> str:
    """A value as YAML writes it in a line."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_text, value))}]"
    if isinstance(value, float):
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa if '.' in mantissa or not e else mantissa + '.0'}{e}{exponent.replace('-0', '-')}"
    return value if isinstance(value, str) else json.dumps(value)


def flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested mapping as (dotted key, value); an empty mapping is a leaf."""
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, dict) and value:
            yield from flatten(value, key)
        else:
            yield key, value
