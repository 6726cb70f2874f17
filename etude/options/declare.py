"""How a configuration key is declared: once, as a field of a frozen dataclass with a type, a range, a default, a unit, a
meaning, and when it applies.

Invariant: an instance that exists is within its ranges (pydantic refuses the rest), and everything said of a key anywhere
(refusals, the comments of the YAML tree, the site's page of keys, `etude config KEY`) is computed from its declaration.
Importing a declaration imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pydantic
from typing_extensions import dataclass_transform

from etude.errors import ConfigError, raise_faults
from etude.options.types import allowed, describe_misfit, format_value, item_hint
from etude.registry import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class When:
    """Where a key has an effect: `condition` goes on from "applies", `holds` is given the key's own section and the whole
    configuration."""

    condition: str
    holds: Callable[[Any, Any], bool]


@dataclass(frozen=True)
class Names:
    """The key names something registered: `registry` is `module:NAME`, `builtin` what that holds without plugins, where
    looking would import torch. `late`: a name is judged when a run starts rather than when it is composed."""

    registry: str
    builtin: tuple[str, ...] = ()
    late: bool = False


@dataclass(frozen=True)
class Key:
    """What is said of a key beside its type and default.

    `written` is its default as YAML where that is another key's value, `alias_of` the key that it is another name of,
    `verl_default` (as YAML) and `verl_meaning` are what verl 0.9.1 has under the same name where that is something else, and
    `path` what it names on this machine: a file or code that is there, a model, a checkpoint, a place that is written to, or
    a variable of the environment.
    """

    meaning: str
    unit: str = ""
    written: str = ""
    alias_of: str = ""
    verl_default: str = ""
    verl_meaning: str = ""
    names: Names | None = None
    path: Literal["", "file", "code", "model", "checkpoint", "output", "environment"] = ""
    when: When | None = None


@dataclass(frozen=True)
class Declaration:
    """A key of a whole configuration. `when` are its own condition and those of the sections that it lies in, each with
    the section that the condition is asked of."""

    key: str
    hint: Any
    default: Any
    about: Key
    when: tuple[tuple[str, When], ...]

    @property
    def section(self) -> str:
        """The key of the section that it lies in; empty at the root."""
        return self.key.rpartition(".")[0]


def key(
    meaning: str,
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    **about: Any,
) -> Any:
    """A field of a section: a value, or a section of its own. `about` are fields of `Key`."""
    metadata = {"key": Key(meaning, **about)}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, field_specifiers=(key,))
def options(cls: type[T]) -> type[T]:
    """Makes `cls` a section: a frozen dataclass whose values are checked, `ConfigError` naming those that do not fit.

    A relation between its own keys that must hold is a `__post_init__` that raises ValueError.
    """
    made: Any = pydantic.dataclasses.dataclass(frozen=True, config={"extra": "forbid", "allow_inf_nan": False})(cls)
    checked = made.__init__

    @functools.wraps(checked)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            checked(self, *args, **kwargs)
        except pydantic.ValidationError as error:
            raise_faults(ConfigError(text, key=name) for name, text in problems(type(self), error, kwargs).items())

    made.__init__ = initialise
    return typing.cast(type[T], made)


def declarations(cls: type, prefix: str = "") -> dict[str, Declaration]:
    """The keys of `cls` and of the sections in it, in order, by dotted key."""
    if (cls, prefix) not in _declarations:
        _declarations[cls, prefix] = {each.key: each for each in _walk(cls, prefix, ())}
    return _declarations[cls, prefix]


_declarations: dict[tuple[type, str], dict[str, Declaration]] = {}


def _walk(cls: type, prefix: str, when: tuple[tuple[str, When], ...]) -> Iterator[Declaration]:
    hints = typing.get_type_hints(cls, include_extras=True)
    for each in dataclasses.fields(cls):
        name, hint, about = f"{prefix}{each.name}", hints[each.name], each.metadata["key"]
        section = prefix.removesuffix(".")
        conditions = (*when, (section, about.when)) if about.when else when
        if dataclasses.is_dataclass(hint):  # its factory may be a section with other defaults
            yield from _walk(typing.cast(type, each.default_factory), f"{name}.", conditions)
        else:
            factory = each.default_factory
            default = each.default if factory is dataclasses.MISSING else factory()
            yield Declaration(name, hint, default, about, conditions)


def problems(cls: type, error: pydantic.ValidationError, values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key → what is wrong with its value, one entry a key."""
    declared = declarations(cls, prefix)
    found: dict[str, str] = {}
    for each in error.errors(include_url=False, include_context=False):
        path = [str(part) for part in each["loc"]]
        depth, name = next(
            ((n, ".".join(path[:n])) for n in range(len(path), 0, -1) if prefix + ".".join(path[:n]) in declared),
            (len(path), ".".join(path)),
        )
        full = prefix + name
        if full in found:
            continue
        declaration = declared.get(full)
        if each["type"] in ("unexpected_keyword_argument", "invalid_key"):
            near = did_you_mean(path[-1], [k.rpartition(".")[2] for k in declared])
            nested = ": write one section in the other, not a dot" if "." in path[-1] else near
            found[full] = f"unknown key {full}{nested}"
        elif declaration is not None and each["type"] == "missing" and depth == len(path):
            found[full] = f"{full} is required: set it to {allowed(declaration.hint)}"
        elif declaration is not None:
            found[full] = _misfit(declaration, _at(values, name), path[depth:], each["input"])
        elif each["type"] == "value_error":
            reason = each["msg"].removeprefix("Value error, ")
            found[full] = f"{full.removesuffix('.') or cls.__name__}: {reason}"
        else:
            found[full] = f"{full} must be a section of key: value, got {format_value(each['input'])}"
    return found


def _misfit(declaration: Declaration, value: object, rest: list[str], entry: object) -> str:
    name, hint = declaration.key, declaration.hint
    inner = item_hint(hint)
    if inner is not None and rest and rest[-1].isdigit():
        name, hint, value = f"{name}[{rest[-1]}]", inner, entry
    elif isinstance(value, Mapping) and rest and rest[0] in value and not isinstance(value[rest[0]], Mapping):
        name, value = f"{name}.{rest[0]}", value[rest[0]]
    return describe_misfit(name, hint, value)


def _at(values: Any, name: str) -> object:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return typing.cast(object, values)
