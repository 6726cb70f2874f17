"""A section's values against its declaration: what does not fit, each with its key and what is allowed, all at once.

Invariant: `build` ends, and returns an instance whatever is wrong, with defaults in place of what is, so that further checks
can be made (none where a key without a default is missing or wrong); nothing is guessed (no text becomes a boolean, no
fraction a whole number). The words for what does not fit, the nearest known key among them, are `problems` in `declare`,
which refuses the same of a section that code makes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import pydantic

from etude.errors import ConfigError, raise_faults
from etude.options.declare import problems

T = TypeVar("T")


def to_options(cls: type[T], section: Mapping[str, Any], key_prefix: str = "") -> T:
    """`section` as an instance of the declared section `cls`, whose own key is `key_prefix`.

    Raises:
        ConfigError: names every key that is unknown, or whose value does not fit.
    """
    made, found = build(cls, section, f"{key_prefix}." if key_prefix else "")
    raise_faults(ConfigError(text, key=name) for name, text in found.items())
    assert made is not None
    return made


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> tuple[T | None, dict[str, str]]:
    """(an instance, what is wrong by dotted key); the instance has defaults in place of what is wrong, and is None where
    there is none."""
    left, found = _copy(values), dict[str, str]()
    while True:
        try:
            return cls.__pydantic_validator__.validate_python(left), found  # type: ignore[attr-defined]
        except pydantic.ValidationError as error:
            wrong = problems(cls, error, left, prefix)
            found |= {name: text for name, text in wrong.items() if name not in found}
            removed = [_remove(left, name.removeprefix(prefix)) for name in wrong]
            if not any(removed):  # what is wrong is a key that is not there
                return None, found


def _copy(values: Any) -> Any:
    """Sections may lose keys here; the caller's do not."""
    return {name: _copy(value) for name, value in values.items()} if isinstance(values, Mapping) else values


def _remove(values: dict[Any, Any], name: str) -> bool:
    """Removes the entry of a dotted name; false if there is none. Keys of YAML may be numbers or have dots themselves."""
    if not name:  # the section itself is wrong
        was_empty = not values
        values.clear()
        return not was_empty
    for key, value in values.items():
        if str(key) == name:
            del values[key]
            return True
        if isinstance(value, dict) and name.startswith(f"{key}.") and _remove(value, name[len(f"{key}.") :]):
            return True
    return False


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
