"""`trace`: a chat template rendered with contents that stand for any text.

A template is a program; what it writes for one set of messages says nothing of another, unless it is known what the
program asked of the contents on its way. Here contents are `Rope`s: texts that take part in concatenation and output as
they are, remember which part of the result they are, and note every question that is asked of them ("do you start with
`<tool_response>`?", "are you empty?") with its answer.

Invariant: for all contents that answer the noted questions alike the template goes the same way, so that its text is the
`Form`'s parts with those contents in their places. Whatever else a template does with a content (slicing, iterating,
comparing it with another …) raises `Untraceable`, and then the template has to be rendered each time.

The rendering runs in the environment that Transformers compiles templates with, in which the places where Python's C code
would read a text past its methods (joining, `%`, filters, calls) are guarded.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.runtime import Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

_QUESTIONS = ("startswith", "endswith", "isspace", "isdigit", "__contains__", "__eq__", "__ne__", "__len__")
_CHANGES: dict[str, Callable[..., str]] = {
    name: getattr(str, name)
    for name in ("strip", "lstrip", "rstrip", "replace", "lower", "upper", "capitalize", "removeprefix", "removesuffix")
}
_CHANGES["tojson"] = lambda text: json.dumps(text, ensure_ascii=False)[1:-1]  # as Transformers' filter writes it
_HANDS_ON = {  # filters that look at a content only through its methods
    *("string", "list", "first", "last", "reverse", "default", "d", "length", "count", "items", "trim", "replace"),
    *("lower", "upper", "capitalize", "select", "selectattr", "reject", "rejectattr", "map"),
}


class Untraceable(Exception):
    """What the template does with a content depends on more of it than can be noted."""


@dataclass(frozen=True)
class Slot:
    """Where content number `index` stands, after `changes`: methods of texts with their arguments."""

    index: int
    changes: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def of(self, contents: Sequence[str]) -> str:
        """What stands there for these contents."""
        text = contents[self.index]
        for name, args in self.changes:
            text = _CHANGES[name](text, *args)
        return text


Part = str | Slot


def filled(parts: Iterable[Part], contents: Sequence[str]) -> str:
    """The text of `parts`."""
    return "".join([part if type(part) is str else part.of(contents) for part in parts])  # type: ignore[union-attr]


@dataclass(frozen=True)
class Question:
    """What was asked of a text made of `parts`, and the answer."""

    parts: tuple[Part, ...]
    method: str
    args: tuple[Any, ...]
    answer: Any

    def put(self, contents: Sequence[str]) -> bool:
        """Whether these contents answer alike."""
        return bool(getattr(filled(self.parts, contents), self.method)(*self.args) == self.answer)


@dataclass(frozen=True)
class Form:
    """A rendered text for all contents that answer its questions alike; no two literal parts stand side by side."""

    parts: tuple[Part, ...]
    questions: tuple[Question, ...]

    def holds(self, contents: Sequence[str]) -> bool:
        """Whether the form is that of these contents."""
        return all(question.put(contents) for question in self.questions)

    def filled(self, contents: Sequence[str]) -> str:
        """The text with these contents."""
        return filled(self.parts, contents)


class _Trace:
    def __init__(self, contents: Sequence[str]) -> None:
        self.contents = contents
        self.questions: dict[tuple[Any, ...], Question] = {}

    def ask(self, rope: Rope, method: str, args: tuple[Any, ...]) -> Any:
        if not all(arg is None or type(arg) in (str, int, bool) or _is_texts(arg) for arg in args):
            raise Untraceable(f"{method} with {args!r:.80}")
        answer = getattr(str(filled(rope.parts, self.contents)), method)(*args)
        self.questions[rope.parts, method, args] = Question(rope.parts, method, args, answer)
        return answer


def _is_texts(value: object) -> bool:
    return type(value) is tuple and all(type(each) is str for each in value)


class Rope(str):
    """A text of which it is known where its contents stand."""

    parts: tuple[Part, ...]
    trace: _Trace

    @classmethod
    def of(cls, trace: _Trace, parts: Iterable[Part]) -> Rope:
        """The rope of `parts`, neighbouring literals joined and empty ones left out."""
        joined: list[Part] = []
        for part in parts:
            if isinstance(part, str) and joined and isinstance(joined[-1], str):
                joined[-1] += part
            elif part != "":
                joined.append(part)
        rope = str.__new__(cls, filled(joined, trace.contents))
        rope.parts, rope.trace = tuple(joined), trace
        return rope

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        return concatenated([self, other]) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return concatenated([other, self]) if isinstance(other, str) else NotImplemented

    def __bool__(self) -> bool:
        return self.trace.ask(self, "__ne__", ("",)) is True

    def changed(self, name: str, *args: Any) -> Rope:
        """The rope after a method that gives a text."""
        if len(self.parts) != 1 or not all(type(arg) in (str, int) or arg is None for arg in args):
            raise Untraceable(name)
        slot = self.parts[0]
        assert isinstance(slot, Slot)
        return Rope.of(self.trace, [Slot(slot.index, (*slot.changes, (name, args)))])


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise Untraceable(name)

    return refuse


def _prepare() -> None:
    """Gives `Rope` its methods: no method of `str` is left that would read the text unseen."""
    harmless = {"__new__", "__init__", "__getattribute__", "__setattr__", "__delattr__", "__class__", "__doc__"}
    harmless |= {"__dir__", "__init_subclass__", "__subclasshook__", "__sizeof__", "__getstate__"} | vars(Rope).keys()

    def asking(name: str) -> Callable[..., Any]:
        return lambda self, *args: self.trace.ask(self, name, args)

    def changing(name: str) -> Callable[..., Rope]:
        return lambda self, *args: self.changed(name, *args)

    for name in {*dir(str), "__rmod__", "__rmul__"} - harmless:
        made = asking if name in _QUESTIONS else changing if name in _CHANGES else _refusing
        setattr(Rope, name, made(name))


_prepare()


def concatenated(pieces: Iterable[str]) -> str:
    """`"".join(pieces)`, in which ropes stay ropes."""
    pieces = list(pieces)
    rope = next((piece for piece in pieces if isinstance(piece, Rope)), None)
    if rope is None:
        return "".join(pieces)
    parts = (part for piece in pieces for part in (piece.parts if isinstance(piece, Rope) else (str(piece),)))
    return Rope.of(rope.trace, parts)


def _may_hold(value: object) -> bool:
    """Whether there is, or might be, a rope in `value`."""
    if isinstance(value, Rope):
        return True
    if value is None or isinstance(value, str | int | float | Undefined | Macro):
        return False
    if isinstance(value, Mapping):
        return any(map(_may_hold, value.values()))
    return not isinstance(value, list | tuple) or any(map(_may_hold, value))


class _Environment(ImmutableSandboxedEnvironment):
    concat = staticmethod(concatenated)
    intercepted_binops = frozenset({"%"})

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        keeps = isinstance(__obj, Macro) or any(__obj is __self.globals.get(name) for name in ("namespace", "dict"))
        if not keeps and (_may_hold(args) or _may_hold(kwargs)):
            raise Untraceable("a call")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _may_hold(left) or _may_hold(right):
            raise Untraceable(operator)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        return None if isinstance(getattr(value, "__self__", None), Rope) else super().wrap_str_format(value)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        seen = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if _may_hold(seen) or _may_hold(kwargs):
            raise Untraceable(name)
        return function(*args, **kwargs)

    return guarded


def _joined(values: Iterable[Any], between: str = "") -> str:
    pieces = [piece for value in values for piece in (str(between), str(value))]
    return concatenated(pieces[1:])


def _type_only(test: Any) -> Callable[[Any], Any]:
    return lambda value: True if isinstance(value, Rope) else test(value)


def _is_plain_join(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return not kwargs and len(args) <= 2 and isinstance(args[0], list | tuple)


class Tracer:
    """Traces one template. `environment` is the one that Transformers has compiled it in."""

    def __init__(self, source: str, environment: ImmutableSandboxedEnvironment) -> None:
        own = object.__new__(_Environment)
        own.__dict__.update(environment.__dict__)
        own.cache = None
        own.filters = {
            name: function if name in _HANDS_ON else _guarded(name, function)
            for name, function in environment.filters.items()
        }
        own.filters["tojson"] = self._json(own.filters["tojson"])
        own.filters["join"] = self._join(environment.filters["join"], own.filters["join"])
        own.tests = environment.tests | {name: _type_only(environment.tests[name]) for name in ("iterable", "sequence")}
        own.globals = environment.globals | {"strftime_now": _refusing("strftime_now")}
        parsed = own.parse(source)
        own.filters["concatenated"] = _joined
        for concat in list(parsed.find_all(nodes.Concat)):  # `a ~ b` would join past the environment
            replaced = nodes.Filter(nodes.List(concat.nodes), "concatenated", [], [], None, None)
            _put_in_place(parsed, concat, replaced.set_lineno(concat.lineno))
        self._template = own.from_string(parsed)

    def trace(self, contents: Sequence[str], variables: Callable[[Sequence[str]], Mapping[str, Any]]) -> Form:
        """The form of `contents`; `variables` makes the template's variables of what stands for them.

        Raises:
            Untraceable: there is none.
            Exception: whatever the template raises.
        """
        trace = _Trace(contents)
        ropes = [Rope.of(trace, [Slot(index)]) for index in range(len(contents))]
        text = self._template.render(**variables(ropes))
        parts: tuple[Part, ...] = text.parts if isinstance(text, Rope) else (text,)
        return Form(parts, tuple(trace.questions.values()))

    @staticmethod
    def _json(guarded: Callable[..., Any]) -> Callable[..., Any]:
        def tojson(value: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(value, Rope) and not args and not kwargs:
                return concatenated(['"', value.changed("tojson"), '"'])
            return guarded(value, *args, **kwargs)

        return tojson

    @staticmethod
    def _join(plain: Any, guarded: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def join(*args: Any, **kwargs: Any) -> Any:
            return _joined(*args[1:]) if _is_plain_join(args[1:], kwargs) else guarded(*args, **kwargs)

        return join


def _put_in_place(tree: nodes.Node, old: nodes.Node, new: nodes.Node) -> None:
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for name in parent.fields:
            value = getattr(parent, name, None)
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list):
                setattr(parent, name, [new if each is old else each for each in value])
