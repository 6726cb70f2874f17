"""`TraceSpan`: one recorded section of a trajectory; and `span`, which records nested spans through a context variable.

Invariant: a span's parent is the span that was open in its context when it began; tasks inherit the context in which they
are started, so spans of concurrent trajectories never mix. Outside a traced trajectory `span` records nothing.

`watch_spans` tracks which spans are open, traced or not, without recording them.

`backends` defines where spans go, `tracer` which trajectories are traced.
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

_WAITS = {"generation": "the engine", "scorer": "the scorer"}  # what spans of a kind wait for; others: kind and name

_numbers = itertools.count(1)


@dataclass
class TraceSpan:
    """A tool call, a generation, or a function under `rollout_trace_op`.

    Attributes:
        name, kind: the operation; `kind` is for example "trajectory", "generation", "tool", "scorer" or "op".
        trace_id: the same for all spans of a trajectory.
        start: seconds since 1970; `seconds`: duration, 0 until it ends.
        error: class name of the exception that ended it, None without one.
        attributes: JSON values of limited size.
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
        """Sets attributes; large values are truncated, and names beyond the maximum number are ignored."""
        for name, value in attributes.items():
            if len(self.attributes) < _MAX_ATTRIBUTES or name in self.attributes:
                self.attributes[name] = truncate_value(value)


class Backend(Protocol):
    """A destination of spans. When a span begins, its parent's `handle` is set; when it ends, it is complete."""

    def begin(self, span: TraceSpan) -> None:
        """Called when a span begins."""
        ...

    def end(self, span: TraceSpan) -> None:
        """Called when a span has ended."""
        ...

    def close(self) -> None:
        """Flushes pending spans."""
        ...


@dataclass(frozen=True)
class _TraceContext:
    span: TraceSpan | None
    trace_id: str
    backend: Backend


_context: contextvars.ContextVar[_TraceContext | None] = contextvars.ContextVar("etude_trace_place", default=None)


class OpenSpans:
    """The open spans of one piece of work, and how many have `ended`; another thread may read it."""

    def __init__(self) -> None:
        self.began, self.ended = time.monotonic(), 0
        self._open: dict[int, tuple[str, float]] = {}

    def open(self) -> list[tuple[str, float]]:
        """Returns what each open span waits for, and its start time by `time.monotonic`."""
        return list(self._open.values())

    def begin(self, what: str) -> int:
        """Adds an open span; returns its number."""
        self._open[number := next(_numbers)] = (what, time.monotonic())
        return number

    def end(self, number: int) -> None:
        """Removes a span that has ended."""
        self._open.pop(number, None)
        self.ended += 1


_watched: contextvars.ContextVar[OpenSpans | None] = contextvars.ContextVar("etude_open_spans", default=None)


@contextmanager
def watch_spans(spans: OpenSpans) -> Iterator[None]:
    """Keeps the spans that open inside the block, or in tasks started there, in `spans` while they are open."""
    token = _watched.set(spans)
    try:
        yield
    finally:
        _watched.reset(token)


@contextmanager
def span(kind: str, name: str) -> Iterator[TraceSpan | None]:
    """Records its block as a span, and yields the `TraceSpan`; None if nothing is traced here."""
    context, watched = _context.get(), _watched.get()
    number = None if watched is None else watched.begin(_WAITS.get(kind, f"{kind} {name}"))
    try:
        if context is None:
            yield None
        else:
            with _record(context, TraceSpan(name, kind, context.trace_id, context.span)) as recorded:
                yield recorded
    finally:
        if watched is not None and number is not None:
            watched.end(number)


@contextmanager
def _record(context: _TraceContext, recorded: TraceSpan) -> Iterator[TraceSpan]:
    context.backend.begin(recorded)
    token, began = _context.set(replace(context, span=recorded)), time.perf_counter()
    try:
        yield recorded
    except BaseException as error:
        recorded.error = type(error).__name__
        raise
    finally:
        recorded.seconds = time.perf_counter() - began
        _context.reset(token)
        context.backend.end(recorded)


def is_traced() -> bool:
    """Whether a span would be recorded here."""
    return _context.get() is not None


@contextmanager
def traced(backend: Backend, trace_id: str) -> Iterator[None]:
    """Sends spans that begin inside the block, or in tasks started there, to `backend` under `trace_id`."""
    token = _context.set(_TraceContext(None, trace_id, backend))
    try:
        yield
    finally:
        _context.reset(token)


class SpanList:
    """A backend that keeps spans in a list, in the order in which they end."""

    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []

    def begin(self, span: TraceSpan) -> None:
        """Does nothing."""

    def end(self, span: TraceSpan) -> None:
        """Appends the span."""
        self.spans.append(span)

    def close(self) -> None:
        """Does nothing."""


@contextmanager
def collect_spans() -> Iterator[list[TraceSpan]]:
    """Yields a list to which the spans of everything awaited inside the block are appended as they end."""
    collected = SpanList()
    with traced(collected, "collected"):
        yield collected.spans


def rollout_trace_op(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Decorates a coroutine function: traced calls are recorded as spans, with arguments and result or error."""
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
    """Returns the arguments by name, without `self`."""
    try:
        named = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:  # the call itself will raise this
        return {}
    named.pop("self", None)
    return named
