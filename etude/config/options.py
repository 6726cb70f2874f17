"""Sections of the configuration as the frozen dataclasses that the rooms declare.

Invariant: the fields of a dataclass are the keys of its section; a key without a field, a field without a value and a
value of another type are each one `ConfigError` that names the full key. Rooms never see a `DictConfig`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, Union

from omegaconf import DictConfig, OmegaConf

from etude.config.values import coerce, mismatch
from etude.errors import ConfigError
from etude.registry import did_you_mean

T = TypeVar("T")


def to_options(
    cls: type[T], section: Mapping[str, Any] | DictConfig, key_prefix: str = "", *, ignore: Collection[str] = ()
) -> T:
    """`section` as an instance of the dataclass `cls`; nested dataclasses, tuples, `Optional`, `Literal` and enums work.

    Args:
        key_prefix: the section's own key ("data"), for messages.
        ignore: keys of the section that belong to someone else.

    Raises:
        ConfigError: a key has no field, a required field has no key, or a value has the wrong type; names the key.
    """
    values = OmegaConf.to_container(section, resolve=True) if isinstance(section, DictConfig) else dict(section)
    assert isinstance(values, dict)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for name in values:
        if name not in fields and name not in ignore:
            raise ConfigError(f"unknown key {_join(key_prefix, str(name))}{did_you_mean(str(name), fields)}")
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        key = _join(key_prefix, name)
        if name in values:
            arguments[name] = _field(values[name], hints[name], key)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{key} is required")
    try:
        return cls(**arguments)
    except ValueError as error:  # a dataclass's own check in __post_init__
        raise ConfigError(f"{key_prefix or cls.__name__}: {error}") from error


def _field(value: object, hint: Any, key: str) -> Any:
    nested = _dataclass_of(hint)
    if nested is None:
        return coerce(value, hint, key)
    if value is None and type(None) in typing.get_args(hint):
        return None
    if not isinstance(value, Mapping):
        raise mismatch(value, dict, key)
    return to_options(nested, value, key)


def _dataclass_of(hint: Any) -> type | None:
    """The dataclass in `hint`, which is one or `Optional` of one."""
    candidates = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((c for c in candidates if isinstance(c, type) and dataclasses.is_dataclass(c)), None)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
