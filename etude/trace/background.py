"""`Guarded`: a backend whose failure only loses spans; `Background`: keeps a backend that may block on the network off the
event loop.

Invariant of `Background`: `begin` and `end` reach the backend in order, from one thread, and callers never wait for it; when
`limit` calls are queued, whole spans are dropped (never only the end of one) and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from etude.errors import one_line
from etude.trace.span import Backend, TraceSpan

_MOST_WAITING = 10_000
_CLOSING_SECONDS = 15.0

logger = logging.getLogger(__name__)


class Guarded:
    """Wraps a backend and disables it after its first failure, which is logged."""

    def __init__(self, backend: Backend) -> None:
        self._backend: Backend | None = backend

    def begin(self, span: TraceSpan) -> None:
        self._attempt(lambda backend: backend.begin(span))

    def end(self, span: TraceSpan) -> None:
        self._attempt(lambda backend: backend.end(span))

    def close(self) -> None:
        self._attempt(lambda backend: backend.close())

    def _attempt(self, call: Callable[[Backend], None]) -> None:
        if self._backend is None:
            return
        try:
            call(self._backend)
        except Exception as error:  # a third-party library may raise anything
            self._backend = None
            logger.warning("tracing stopped: %s: %s", type(error).__name__, one_line(error))


class Background:
    """Calls `backend` from a daemon thread, through a queue of at most about `limit` calls."""

    def __init__(self, backend: Backend, limit: int = _MOST_WAITING) -> None:
        self._backend, self._limit = Guarded(backend), limit
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun: set[str] = set()  # ids of open spans that were not dropped
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, name="etude-trace", daemon=True)
        self._thread.start()

    def begin(self, span: TraceSpan) -> None:
        """Queues the span's beginning; drops the span if the queue is full or its parent was dropped."""
        orphan = span.parent is not None and span.parent.span_id not in self._begun
        if orphan or self._calls.qsize() >= self._limit:
            self.dropped += 1
            return
        self._begun.add(span.span_id)
        self._calls.put(lambda: self._backend.begin(span))

    def end(self, span: TraceSpan) -> None:
        """Queues the span's end, unless the span was dropped."""
        if span.span_id in self._begun:
            self._begun.discard(span.span_id)
            self._calls.put(lambda: self._backend.end(span))

    def close(self) -> None:
        """Waits up to `_CLOSING_SECONDS` until the queue is processed and the backend closed."""
        self._calls.put(self._backend.close)
        self._calls.put(None)
        self._thread.join(_CLOSING_SECONDS)
        if self.dropped:
            logger.warning("tracing fell behind: %d spans were dropped", self.dropped)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
