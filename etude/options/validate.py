"""A section's values against its declaration: what does not fit, each with its key and what is allowed, all at once.

Invariant: `build` returns an instance whatever is wrong, with defaults in place of what is, so that further checks can be
made; nothing is guessed (no text becomes a boolean, no fraction a whole number).
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic

from etude.errors import one_line, raise_faults
from etude.options.declare import MAX_TEXT, MAX_WHOLE, Declaration, allowed, choices, declarations, item_hint
from etude.registry import did_you_mean

T = TypeVar("T")
_MOST_SHOWN = 80  # characters of a wrong value


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
        if declaration is not None:
            found[full] = _misfit(declaration, _at(values, name), path[depth:], each["input"])
        elif each["type"] == "unexpected_keyword_argument":
            siblings = [k.removeprefix(prefix) for k in declared]
            near = did_you_mean(path[-1], [k.rpartition(".")[2] for k in siblings])
            found[full] = f"unknown key {full}{near}"
        elif each["type"] == "value_error":
            found[full] = f"{full.removesuffix('.') or cls.__name__}: {one_line_of(each['msg'])}"
        else:
            found[full] = f"{full} must be a section of key: value, got {shown(each['input'])}"
    return found


def _misfit(declaration: Declaration, value: object, rest: list[str], entry: object) -> str:
    name, hint = declaration.key, declaration.hint
    inner = item_hint(hint)
    if inner is not None and rest and rest[-1].isdigit():
        name, hint, value = f"{name}[{rest[-1]}]", inner, entry
    return misfit(name, hint, value)


def misfit(name: str, hint: Any, value: object) -> str:
    """The sentence for a `value` that is not of type `hint`."""
    near = did_you_mean(value, choices(hint)) if isinstance(value, str) else ""
    wanted = allowed(hint)
    if isinstance(value, str) and wanted.startswith("text"):
        wanted = wanted.replace("text", f"text that is not blank, without NUL, of at most {MAX_TEXT} characters", 1)
    if isinstance(value, int) and value > MAX_WHOLE and "whole number" in wanted:
        wanted += f" (at most {MAX_WHOLE})"
    return f"{name} must be {wanted}, got {shown(value)}{near}"


def shown(value: object) -> str:
    """A value as an error message shows it."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def one_line_of(message: str) -> str:
    """Pydantic's "Value error, …" without its beginning."""
    return one_line(ValueError(message.removeprefix("Value error, ")))


def _copy(values: Any) -> Any:
    """Sections may lose keys here; the caller's do not."""
    return {name: _copy(value) for name, value in values.items()} if isinstance(values, Mapping) else values


def _at(values: Any, name: str) -> object:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return typing.cast(object, values)


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
