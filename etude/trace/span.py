"""`TraceSpan`: one recorded section of a trajectory; and `span`, which records nested spans through a context variable.

Invariant: a span's parent is the span that was open in its context when it began; tasks inherit the context in which they
are started, so spans of concurrent trajectories never mix. Outside a traced trajectory `span` records nothing. Time and size
of an attribute are limited however large its value is; of objects of unknown classes only the class name is read, so tracing
has no side effects and cannot fail.

`tracer` defines where spans go, and which trajectories are traced.
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
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MAX_CHARS = 4_000
_MAX_ATTRIBUTES = 64
_MAX_ITEMS = 50
_MAX_DEPTH = 5

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


@contextmanager
def span(kind: str, name: str) -> Iterator[TraceSpan | None]:
    """Records its block as a span, and yields the `TraceSpan`; None if nothing is traced here."""
    context = _context.get()
    if context is None:
        yield None
        return
    recorded = TraceSpan(name, kind, context.trace_id, context.span)
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


def truncate_value(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Converts any value to a JSON value: long text is truncated, long containers are cut and end with a count, and other
    objects become their class name."""
    if value is None or (isinstance(value, bool | int | float) and not isinstance(value, Enum)):
        return value if not isinstance(value, int) or abs(value) < 2**63 else f"<int of {value.bit_length()} bits>"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        text = value if len(value) <= MAX_CHARS else f"{value[:MAX_CHARS]}… ({len(value)} characters)"
        return text.encode("utf-8", "replace").decode("utf-8")
    if depth == 0:
        return f"<{type(value).__name__}>"
    if type(value) in (list, tuple):
        more = [f"… ({len(value)} items)"] if len(value) > _MAX_ITEMS else []
        return [truncate_value(item, depth - 1) for item in value[:_MAX_ITEMS]] + more
    pairs = _pairs(value)
    if pairs is None:
        return f"<{type(value).__name__}>"
    named = {
        str(key)[:100] if isinstance(key, str | int) else "?": truncate_value(item, depth - 1)
        for key, item in pairs[:_MAX_ITEMS]
    }
    return named | ({"…": f"{len(pairs)} entries"} if len(pairs) > _MAX_ITEMS else {})


def _pairs(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the items of a dict, or the non-empty fields of a dataclass or pydantic model; None for other values."""
    if isinstance(value, dict):
        return (
            [(key, value[key]) for key, _ in zip(value, range(_MAX_ITEMS + 1))]
            if len(value) > 10_000
            else list(value.items())
        )
    if is_dataclass(value) and not isinstance(value, type):
        return [(f.name, item) for f in fields(value) if (item := getattr(value, f.name, None)) not in (None, {}, [])]
    declared = getattr(type(value), "model_fields", None)
    if isinstance(declared, Mapping):
        return [(name, item) for name in declared if (item := getattr(value, name, None)) is not None]
    return None
