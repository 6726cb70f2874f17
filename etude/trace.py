"""`rollout_trace_op`: records what a trajectory waited for.

A decorated coroutine leaves one `TraceSpan` in the list that `collect_spans` opened around it; outside such a block it
costs one context-variable look-up. Spans of concurrent trajectories never mix: the list travels with the task's context.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class TraceSpan:
    """One recorded call: `start` in seconds of `time.perf_counter`, `seconds` of duration, `error` class name or None."""

    name: str
    start: float
    seconds: float
    error: str | None = None


_spans: ContextVar[list[TraceSpan] | None] = ContextVar("etude_trace_spans", default=None)


@contextmanager
def collect_spans() -> Iterator[list[TraceSpan]]:
    """Collects the spans of everything awaited inside the block, tasks started there included."""
    spans: list[TraceSpan] = []
    token = _spans.set(spans)
    try:
        yield spans
    finally:
        _spans.reset(token)


def rollout_trace_op(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Decorates a coroutine function so that each call is recorded with its duration and its error, if any."""

    @functools.wraps(function)
    async def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        spans = _spans.get()
        if spans is None:
            return await function(*args, **kwargs)
        start, error = time.perf_counter(), None
        try:
            return await function(*args, **kwargs)
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            spans.append(TraceSpan(function.__qualname__, start, time.perf_counter() - start, error))

    return traced
