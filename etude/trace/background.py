"""`Guarded`: a backend whose failure costs spans alone; `Background` keeps one that may block on the network off the event
loop.

Invariant: `begin` and `end` reach the backend in order, from one thread, and never wait for it; when it falls
`_MOST_WAITING` calls behind, whole spans are dropped (never an end without its beginning) and counted.
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
    """A backend that is disabled by its first failure, which is logged."""

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
    """`backend` behind a queue and a daemon thread."""

    def __init__(self, backend: Backend, limit: int = _MOST_WAITING) -> None:
        self._backend, self._limit = Guarded(backend), limit
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun: set[str] = set()  # spans whose beginning was passed on
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, name="etude-trace", daemon=True)
        self._thread.start()

    def begin(self, span: TraceSpan) -> None:
        """Passes the span on, unless the queue is full or its parent was dropped."""
        orphan = span.parent is not None and span.parent.span_id not in self._begun
        if orphan or self._calls.qsize() >= self._limit:
            self.dropped += 1
            return
        self._begun.add(span.span_id)
        self._calls.put(lambda: self._backend.begin(span))

    def end(self, span: TraceSpan) -> None:
        """Passes on the end of a span whose beginning was passed on."""
        if span.span_id in self._begun:
            self._begun.discard(span.span_id)
            self._calls.put(lambda: self._backend.end(span))

    def close(self) -> None:
        """Waits, for a bounded time, until the backend has everything."""
        self._calls.put(self._backend.close)
        self._calls.put(None)
        self._thread.join(_CLOSING_SECONDS)
        if self.dropped:
            logger.warning("tracing fell behind: %d spans were dropped", self.dropped)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
