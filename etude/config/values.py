"""Turns what YAML or a command line gives into the type that a key has.

Invariant: a value either becomes exactly the wished type or raises one `ConfigError` that names its key; nothing is
guessed (no text becomes a boolean, no fraction becomes a whole number). Leaves to others which type a key has.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union

from etude.errors import ConfigError
from etude.registry import did_you_mean

_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def coerce(value: object, hint: Any, key: str) -> Any:
    """`value` as the type that `hint` (a type annotation without forward references) describes.

    Numbers may arrive as text ("1e-6"); a lone value where a sequence is wished is a sequence of one.

    Raises:
        ConfigError: `value` does not fit; names `key`, the wished type and the value.
    """
    origin = typing.get_origin(hint)
    if hint is Any or hint is object:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(value, typing.get_args(hint), hint, key)
    if origin is Literal:
        return _choice(value, typing.get_args(hint), key)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(_choice(value, [member.value for member in hint], key))
    container = origin or hint
    if isinstance(container, type) and issubclass(container, Mapping):
        return _mapping(value, hint, key)
    if container in (tuple, list) or container is Sequence:
        return _sequence(value, hint, key)
    return _scalar(value, hint, key)


def describe(hint: Any) -> str:
    """`hint` in a user's words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in arguments)
    if hint is None or hint is type(None):
        return "null"
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in arguments)
    container = origin or hint
    if container in (tuple, list) or container is Sequence:
        return "a list"
    if isinstance(container, type) and issubclass(container, Mapping):
        return "a section of key: value"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def mismatch(value: object, hint: Any, key: str) -> ConfigError:
    """The error for a `value` that is not of type `hint`."""
    shown = "null" if value is None else repr(value)
    shown = shown if len(shown) <= 80 else shown[:79] + "…"
    return ConfigError(f"{key} must be {describe(hint)}, got {shown}")


def _one_of(value: object, members: Sequence[Any], hint: Any, key: str) -> Any:
    if value is None and type(None) in members:
        return None
    wished = [m for m in members if m is not type(None)]
    exact = [m for m in wished if isinstance(m, type) and type(value) is m]
    for member in [*exact, *wished]:
        try:
            return coerce(value, member, key)
        except ConfigError:
            if len(wished) == 1 and typing.get_origin(wished[0]) is not None:
                raise  # names the entry of the list or section that does not fit
    raise mismatch(value, hint, key)


def _choice(value: object, allowed: Sequence[Any], key: str) -> Any:
    if value in allowed and type(value) in {type(a) for a in allowed}:
        return value
    names = [str(a) for a in allowed]
    raise ConfigError(f"{key} must be one of {', '.join(names)}, got {value!r}{did_you_mean(str(value), names)}")


def _mapping(value: object, hint: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise mismatch(value, hint, key)
    arguments = typing.get_args(hint)
    member = arguments[1] if len(arguments) == 2 else Any
    return {name: coerce(item, member, f"{key}.{name}") for name, item in value.items()}


def _sequence(value: object, hint: Any, key: str) -> Any:
    if value is None or isinstance(value, Mapping):
        raise mismatch(value, hint, key)
    items = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    arguments = typing.get_args(hint) or (Any, ...)
    if (typing.get_origin(hint) or hint) is not tuple:
        return [coerce(item, arguments[0], f"{key}[{i}]") for i, item in enumerate(items)]
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(coerce(item, arguments[0], f"{key}[{i}]") for i, item in enumerate(items))
    if len(items) != len(arguments):
        raise ConfigError(f"{key} must be a list of {len(arguments)} values, got {len(items)}")
    return tuple(coerce(item, member, f"{key}[{i}]") for i, (item, member) in enumerate(zip(items, arguments)))


def _scalar(value: object, hint: Any, key: str) -> Any:
    if hint in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = hint(value)
        except (ValueError, OverflowError):
            raise mismatch(value, hint, key) from None
        if isinstance(value, float) and number != value and value == value:
            raise mismatch(value, hint, key)
        return number
    if hint is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    if isinstance(hint, type) and isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise mismatch(value, hint, key)
