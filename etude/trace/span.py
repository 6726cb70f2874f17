"""`TraceSpan`: one recorded section of a trajectory, and the context that spans nest in.

Invariant: a span's parent is the span that was open where it began, tasks started there included, so that spans of
concurrent trajectories never mix; outside a traced trajectory `span` records nothing.

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
from dataclasses import dataclass, field, replace
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


@contextmanager
def span(kind: str, name: str) -> Iterator[TraceSpan | None]:
    """Records its block, and yields the `TraceSpan`, or None where nothing is traced."""
    place, watched = _place.get(), _watched.get()
    number = None if watched is None else watched.begin(_WAITS.get(kind, f"{kind} {name}"))
    try:
        if place is None:
            yield None
        else:
            with _recorded(place, TraceSpan(name, kind, place.trace_id, place.span)) as recorded:
                yield recorded
    finally:
        if watched is not None and number is not None:
            watched.end(number)


@contextmanager
def _recorded(place: _Place, recorded: TraceSpan) -> Iterator[TraceSpan]:
    place.backend.begin(recorded)
    token, began = _place.set(replace(place, span=recorded)), time.perf_counter()
    try:
        yield recorded
    except BaseException as error:
        recorded.error = type(error).__name__
        raise
    finally:
        recorded.seconds = time.perf_counter() - began
        _place.reset(token)
        place.backend.end(recorded)


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
