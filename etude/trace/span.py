"""`TraceSpan`: one recorded section of a trajectory, and the context that spans nest in.

Invariant: a span's parent is the span that was open where it began, tasks started there included, so that spans of
concurrent trajectories never mix; outside a traced trajectory `span` costs one look-up and records nothing.

`watch_spans` follows the spans that are open, traced or not, without recording them.

Where spans go is left to `backends`, which trajectories are traced to `tracer`.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

from etude.trace.truncation import truncate_value

P = ParamSpec("P")
R = TypeVar("R")

_MAX_ATTRIBUTES = 64

_WAITS = {"generation": "the engine", "scorer": "the scorer"}  # what a span waits for, where its name does not say it

_numbers = itertools.count(1)


@dataclass
class TraceSpan:
    """A tool call, a generation, or a function under `rollout_trace_op`.

    Attributes:
        name, kind: what it is; `kind` is "trajectory", "generation", "tool" or "op".
        trace_id: the same for all spans of a trajectory.
        start: in seconds since 1970; `seconds` is its length, 0 until it ends.
        error: name of the exception's class, None without one.
        attributes: JSON values of bounded size.
        handle: the backend's own data.
    """

    name: str
    kind: str
    trace_id: str
    parent: TraceSpan | None = None
    span_id: str = field(default_factory=lambda: f"{os.getpid():x}-{next(_numbers):x}")
    start: float = field(default_factory=time.time)
    seconds: float = 0.0
    error: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    handle: Any = None

    def set(self, **attributes: Any) -> None:
        """Adds attributes; large values are shortened."""
        for name, value in attributes.items():
            if len(self.attributes) < _MAX_ATTRIBUTES or name in self.attributes:
                self.attributes[name] = truncate_value(value)


class Backend(Protocol):
    """Where spans go. When a span begins, its parent's `handle` is available; when it ends, it is complete."""

    def begin(self, span: TraceSpan) -> None:
        """Called when a span opens."""
        ...

    def end(self, span: TraceSpan) -> None:
        """Called when it has closed."""
        ...

    def close(self) -> None:
        """Flushes what is pending."""
        ...


@dataclass(frozen=True)
class _Place:
    span: TraceSpan | None
    trace_id: str
    backend: Backend


_place: contextvars.ContextVar[_Place | None] = contextvars.ContextVar("etude_trace_place", default=None)


class _Off:
    """The no-op `span` where nothing is traced."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_OFF = _Off()


class _Opening:
    """A span for the length of a block."""

    __slots__ = ("_began", "_place", "_span", "_token")

    def __init__(self, place: _Place, kind: str, name: str) -> None:
        self._place = place
        self._span = TraceSpan(name, kind, place.trace_id, place.span)

    def __enter__(self) -> TraceSpan:
        self._place.backend.begin(self._span)
        self._token = _place.set(_Place(self._span, self._place.trace_id, self._place.backend))
        self._began = time.perf_counter()
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._span.seconds = time.perf_counter() - self._began
        self._span.error = None if kind is None else kind.__name__
        _place.reset(self._token)
        self._place.backend.end(self._span)


class OpenSpans:
    """The spans of one piece of work that are open, and how many have `ended`; read by another thread."""

    def __init__(self) -> None:
        self.began, self.ended = time.monotonic(), 0
        self._open: dict[int, tuple[str, float]] = {}

    def open(self) -> list[tuple[str, float]]:
        """What each open span is, and since when, by `time.monotonic`."""
        return list(self._open.values())

    def begin(self, what: str) -> int:
        """Opens one; returns its number."""
        self._open[number := next(_numbers)] = (what, time.monotonic())
        return number

    def end(self, number: int) -> None:
        """Closes it."""
        self._open.pop(number, None)
        self.ended += 1


_watched: contextvars.ContextVar[OpenSpans | None] = contextvars.ContextVar("etude_open_spans", default=None)


@contextmanager
def watch_spans(spans: OpenSpans) -> Iterator[None]:
    """Spans that open inside the block, in tasks started there too, are kept in `spans` while they are open."""
    token = _watched.set(spans)
    try:
        yield
    finally:
        _watched.reset(token)


class _Watching:
    """A span that is watched, and recorded if it is traced."""

    __slots__ = ("_number", "_span", "_spans", "_what")

    def __init__(self, spans: OpenSpans, what: str, recorded: _Off | _Opening) -> None:
        self._spans, self._what, self._span = spans, what, recorded

    def __enter__(self) -> TraceSpan | None:
        self._number = self._spans.begin(self._what)
        return self._span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._spans.end(self._number)
        self._span.__exit__(kind, error, traceback)


def span(kind: str, name: str) -> _Off | _Opening | _Watching:
    """A context manager that records its block, and yields the `TraceSpan`, or None where nothing is traced."""
    place, spans = _place.get(), _watched.get()
    recorded = _OFF if place is None else _Opening(place, kind, name)
    return recorded if spans is None else _Watching(spans, _WAITS.get(kind, f"{kind} {name}"), recorded)


def is_traced() -> bool:
    """Whether a span would be recorded here."""
    return _place.get() is not None


@contextmanager
def traced(backend: Backend, trace_id: str) -> Iterator[None]:
    """Spans that begin inside the block, in tasks started there too, go to `backend` under `trace_id`."""
    token = _place.set(_Place(None, trace_id, backend))
    try:
        yield
    finally:
        _place.reset(token)


class SpanList:
    """A backend that keeps spans in a list, in the order in which they end."""

    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []

    def begin(self, span: TraceSpan) -> None:
        """Nothing."""

    def end(self, span: TraceSpan) -> None:
        """Keeps it."""
        self.spans.append(span)

    def close(self) -> None:
        """Nothing."""


@contextmanager
def collect_spans() -> Iterator[list[TraceSpan]]:
    """The spans of everything awaited inside the block, as a list that grows while they end."""
    collected = SpanList()
    with traced(collected, "collected"):
        yield collected.spans


def rollout_trace_op(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Decorates a coroutine function: a traced call leaves a span with its arguments, its result or its error."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_traced():
            return await function(*args, **kwargs)
        with span("op", function.__qualname__) as recorded:
            if recorded is not None:
                recorded.set(inputs=_inputs(signature, args, kwargs))
            result = await function(*args, **kwargs)
            if recorded is not None:
                recorded.set(output=result)
            return result

    return call


def _inputs(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, without `self`."""
    try:
        named = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:  # the call itself will raise it
        return {}
    named.pop("self", None)
    return named
