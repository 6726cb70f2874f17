"""The types that a key may have, and what each takes, in words.

Invariant: a value is of its type, finite and within its range, or refused; numbers may arrive as text ("1e-6"), and nothing
else is guessed (no text becomes a boolean, no fraction a whole number).
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator, Strict

from etude.registry import did_you_mean

MAX_WHOLE = 2**31 - 1
MAX_TEXT = 4096  # characters: the longest path that Linux opens
_MAX_SHOWN = 80  # characters of a wrong value


def _as_whole(value: object) -> object:
    try:
        if isinstance(value, str):
            return int(value)
        return int(value) if isinstance(value, float) and value == int(value) else value
    except (ValueError, OverflowError):
        return value


def _as_number(value: object) -> object:
    try:
        return float(value) if isinstance(value, str | int) and not isinstance(value, bool) else value
    except (ValueError, OverflowError):
        return value


def _as_tuple(value: object) -> object:
    """A lone value stands for a list of one."""
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str | int | float) else value


def _encodable(value: str) -> str:
    if not value or "\0" in value or len(value) > MAX_TEXT:
        raise ValueError
    value.encode()  # a UnicodeEncodeError is a ValueError
    return value


def _readable(value: str) -> str:
    if not value.strip():
        raise ValueError
    return _encodable(value)


def _storable(value: Any) -> Any:
    if any(_unstorable(value, "")):
        raise ValueError
    return value


def _unstorable(value: object, place: str) -> Iterator[str]:
    """What in a free-form section is not finite, or no text that a file can hold: "key[0] must be …", one each."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _unstorable(name, place) if not _is_storable(name) else _unstorable(inner, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _unstorable(inner, f"{place}[{number}]")
    elif not _is_storable(value):
        kind = "a finite number" if isinstance(value, float) else "text that UTF-8 can hold"
        yield f"{place} must be {kind}, got {format_value(value)}"


def _is_storable(value: object) -> bool:
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    return not isinstance(value, float) or math.isfinite(value)


Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), AfterValidator(_readable)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_as_tuple)]
RawTexts = Annotated[
    tuple[Annotated[str, Strict(), AfterValidator(_encodable)], ...], BeforeValidator(_as_tuple)
]  # "\n" is one, too
Natural = Annotated[int, Strict(), Ge(0), Le(MAX_WHOLE), BeforeValidator(_as_whole)]
Count = Annotated[int, Strict(), Ge(1), Le(MAX_WHOLE), BeforeValidator(_as_whole)]
CountOrOff = Annotated[Literal[-1] | Count, BeforeValidator(_as_whole)]
Number = Annotated[float, Strict(), BeforeValidator(_as_number)]
NonNegative = Annotated[float, Strict(), Ge(0), BeforeValidator(_as_number)]
Positive = Annotated[float, Strict(), Gt(0), BeforeValidator(_as_number)]
Numbers = Annotated[tuple[Number, ...], BeforeValidator(_as_tuple)]
Share = Annotated[float, Strict(), Ge(0), Le(1), BeforeValidator(_as_number)]
PositiveShare = Annotated[float, Strict(), Gt(0), Le(1), BeforeValidator(_as_number)]
BelowOne = Annotated[float, Strict(), Ge(0), Lt(1), BeforeValidator(_as_number)]
AboveOne = Annotated[float, Strict(), Gt(1), BeforeValidator(_as_number)]
FreeForm = Annotated[Mapping[str, Any], AfterValidator(_storable)]
Sections = Annotated[tuple[Mapping[str, Any], ...], AfterValidator(_storable), BeforeValidator(_as_tuple)]
FreeForms = Annotated[Mapping[str, Mapping[str, Any] | None], AfterValidator(_storable)]

_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def allowed(hint: Any) -> str:
    """What `hint` takes, in a sentence: "a whole number of at least 1 or null"."""
    base, bounds = _parts(hint)
    origin, members = typing.get_origin(base), typing.get_args(base)
    if base is None or base is type(None):
        return "null"
    if _is_union(base):
        return " or ".join(allowed(member) for member in members)
    if origin is Literal:
        return ("one of " if len(members) > 1 else "") + ", ".join(str(member) for member in members)
    if origin is tuple:
        return "a list" if members[-1] is Ellipsis else f"a list of {len(members)} values, each {allowed(members[0])}"
    kind = origin or base
    if dataclasses.is_dataclass(base) or (isinstance(kind, type) and issubclass(kind, Mapping)):
        return "a section of key: value"
    words, (low, high) = _WORDS.get(base, str(base)), _limits(bounds)
    if low and high:
        return f"{words} {low[0]} {low[1]} {high[0]} {high[1]}"
    return words if low is None else f"{words} {'of at least' if low[0] == 'from' else 'above'} {low[1]}"


def allowed_shortly(hint: Any) -> str:
    """The same for a table or a comment: "null | ≥ 1"; empty where the default says it all."""
    base, bounds = _parts(hint)
    members = typing.get_args(base)
    if base is type(None):
        return "null"
    if _is_union(base):
        return " | ".join(
            filter(None, (allowed_shortly(m) for m in sorted(members, key=lambda m: m is not type(None))))
        )
    if typing.get_origin(base) is Literal:
        return " | ".join(str(member) for member in members)
    if typing.get_origin(base) is tuple and members[-1] is not Ellipsis:
        return f"{len(members)} × {allowed_shortly(members[0])}"
    low, high = _limits(bounds)
    if low and high:
        return f"{low[1]} {'<' if low[0] == 'above' else '≤'} x {'<' if high[0] == 'below' else '≤'} {high[1]}"
    return f"> {low[1]}" if low and low[0] == "above" else f"≥ {low[1]}" if low else ""


def item_hint(hint: Any) -> Any:
    """The type of an entry of a list type of any length (or null); None of another type."""
    base, _ = _parts(hint)
    for member in typing.get_args(base) if _is_union(base) else (base,):
        inner, _ = _parts(member)
        if typing.get_origin(inner) is tuple and typing.get_args(inner)[-1] is Ellipsis:
            return typing.get_args(inner)[0]
    return None


def choices(hint: Any) -> tuple[str, ...]:
    """The texts of a closed choice; empty for other types."""
    base, _ = _parts(hint)
    if typing.get_origin(base) is Literal:
        return tuple(str(member) for member in typing.get_args(base))
    return tuple(text for member in typing.get_args(base) for text in choices(member)) if _is_union(base) else ()


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """(type, bounds) of an annotation."""
    bounds: tuple[Any, ...] = ()
    while typing.get_origin(hint) is Annotated:
        bounds = (*(b for b in hint.__metadata__ if isinstance(b, Ge | Gt | Le | Lt)), *bounds)
        hint = hint.__origin__
    return hint, bounds


def _is_union(hint: Any) -> bool:
    return type(None) is not hint and str(typing.get_origin(hint)) in ("typing.Union", "<class 'types.UnionType'>")


Limit = tuple[Literal["from", "above", "to", "below"], str]


def _limits(bounds: tuple[Any, ...]) -> tuple[Limit | None, Limit | None]:
    low: Limit | None = None
    high: Limit | None = None
    for bound in bounds:
        if isinstance(bound, Ge | Gt):
            low = ("from", f"{bound.ge}") if isinstance(bound, Ge) else ("above", f"{bound.gt}")
        elif not (isinstance(bound, Le) and bound.le == MAX_WHOLE):
            high = ("to", f"{bound.le}") if isinstance(bound, Le) else ("below", f"{bound.lt}")
    return low, high


def describe_misfit(name: str, hint: Any, value: object) -> str:
    """The sentence for a `value` that is not of type `hint`; of a free-form section, for each entry that cannot be."""
    if isinstance(value, Mapping) and (entries := list(_unstorable(value, name))):
        return "; ".join(entries)
    near = did_you_mean(value, choices(hint)) if isinstance(value, str) else ""
    wanted = allowed(hint)
    if isinstance(value, str) and wanted.startswith("text"):
        wanted = wanted.replace("text", f"text that is not blank, without NUL, of at most {MAX_TEXT} characters", 1)
    if isinstance(value, int) and value > MAX_WHOLE and "whole number" in wanted:
        wanted += f" (at most {MAX_WHOLE})"
    return f"{name} must be {wanted}, got {format_value(value)}{near}"


def format_value(value: object) -> str:
    """A value as an error message shows it."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
