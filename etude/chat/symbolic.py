"""`Rope`: a content that stands for any text, and what a template that is rendered with it tells of itself.

A template is a program; what it writes for one set of messages says nothing of another, unless it is known what the
program asked of the contents on its way. Here contents are `Rope`s: texts that take part in concatenation and output as
they are, remember which part of the result they are, and note every question that is asked of them ("do you start with
`<tool_response>`?", "are you empty?") with its answer.

Invariant: for all contents that answer the noted questions alike the template goes the same way, so that its text is the
`Form`'s parts with those contents in their places. Whatever else a template does with a content (slicing, iterating,
comparing it with another …) raises `Untraceable`, and then the template has to be rendered each time.

Rendering a template with ropes is left to `tracer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

_QUESTIONS = ("startswith", "endswith", "isspace", "isdigit", "__contains__", "__eq__", "__ne__", "__len__")
_CHANGES: dict[str, Callable[..., str]] = {
    name: getattr(str, name)
    for name in ("strip", "lstrip", "rstrip", "replace", "lower", "upper", "capitalize", "removeprefix", "removesuffix")
}
_CHANGES["tojson"] = lambda text: json.dumps(text, ensure_ascii=False)[1:-1]  # as Transformers' filter writes it


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


class Trace:
    """What one rendering asked of these contents."""

    def __init__(self, contents: Sequence[str]) -> None:
        self.contents = contents
        self.questions: dict[tuple[Any, ...], Question] = {}

    def ask(self, rope: Rope, method: str, args: tuple[Any, ...]) -> Any:
        """The answer of `rope` as it is now, which is noted; `Untraceable` where `args` are more than plain values."""
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
    trace: Trace

    @classmethod
    def of(cls, trace: Trace, parts: Iterable[Part]) -> Rope:
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


def refusing(name: str) -> Callable[..., NoReturn]:
    """A function that is `Untraceable`, whatever it is called with."""

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
        made = asking if name in _QUESTIONS else changing if name in _CHANGES else refusing
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
