"""How a configuration key is declared: once, as a field of a frozen dataclass with a type, a range, a default, a unit, a
meaning, and when it applies.

Invariant: an instance that exists is within its ranges (pydantic refuses the rest), and everything said of a key anywhere
(refusals, the comments of the YAML tree, docs/configuration.md, `etude config KEY`) is computed from its declaration.
Importing a declaration imports neither torch nor any other room.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator, Strict
from typing_extensions import dataclass_transform

from etude.errors import raise_faults

T = TypeVar("T")

MAX_WHOLE = 2**31 - 1
MAX_TEXT = 4096  # characters: the longest path that Linux opens


# -- types: a value is one of these, finite, or refused; numbers may arrive as text ("1e-6") -----------------------------


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
Share = Annotated[float, Strict(), Ge(0), Le(1), BeforeValidator(_as_number)]
PositiveShare = Annotated[float, Strict(), Gt(0), Le(1), BeforeValidator(_as_number)]
BelowOne = Annotated[float, Strict(), Ge(0), Lt(1), BeforeValidator(_as_number)]
AboveOne = Annotated[float, Strict(), Gt(1), BeforeValidator(_as_number)]

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
    if dataclasses.is_dataclass(base) or _is_mapping(base):
        return "a section of key: value"
    words = _WORDS.get(base, str(base))
    return f"{words} {_bounds_in_words(bounds)}".strip() if bounds else words


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


def _is_mapping(hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Mapping)


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


def _bounds_in_words(bounds: tuple[Any, ...]) -> str:
    low, high = _limits(bounds)
    if low and high:
        return f"{low[0]} {low[1]} {high[0]} {high[1]}"
    return "" if low is None else f"of at least {low[1]}" if low[0] == "from" else f"above {low[1]}"


# -- declarations -----------------------------------------------------------------------------------------------------


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

    `written` is its default as YAML where that is another key's value, `alias_of` the key that it is another name of, and
    `path` what it names on disk: a file or code that is there, a model, a checkpoint, or a place that is written to.
    """

    meaning: str
    unit: str = ""
    written: str = ""
    alias_of: str = ""
    names: Names | None = None
    path: Literal["", "file", "code", "model", "checkpoint", "output"] = ""
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
            from etude.options.validate import problems

            raise_faults(list(problems(type(self), error, kwargs).values()))

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
