"""`Admission`: limits a server's concurrent requests, running and waiting.

Invariant: at most `workers` run, at most `max_concurrency` are admitted; a request that is not admitted, or waits longer
than `queue_seconds`, is rejected with a retry time before any of it has run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

from etude.limits import ConcurrencyLimit


class ServerBusy(Exception):
    """Retry in `retry_after` seconds."""

    def __init__(self, reason: str, retry_after: int) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class Admission:
    """Bound to one event loop."""

    def __init__(self, workers: int, max_concurrency: int, queue_seconds: float) -> None:
        self.max_concurrency = max_concurrency
        self.inside = 0
        self.draining = False
        self._workers = workers
        self._queue_seconds = queue_seconds
        self._running = ConcurrencyLimit(workers)
        self._seconds = 0.05  # moving average of a run's duration

    @property
    def running(self) -> int:
        """The number of running requests."""
        return self._running.held

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return self._running.waiting

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """A worker, for the length of the block.

        Raises:
            ServerBusy: the queue is full, the wait was too long, or the server is closing.
        """
        if self.draining:
            raise ServerBusy("the server is shutting down", 5)
        if self.inside >= self.max_concurrency:
            raise ServerBusy(f"{self.inside} requests are in progress, which is the maximum", self._retry_after())
        self.inside += 1
        try:
            try:
                permit = await self._running.acquire(self._queue_seconds)
            except TimeoutError:
                reason = f"no worker was free within {self._queue_seconds:g} s"
                raise ServerBusy(reason, self._retry_after()) from None
            with permit:
                began = asyncio.get_running_loop().time()
                try:
                    yield
                finally:
                    took = asyncio.get_running_loop().time() - began
                    self._seconds += 0.1 * (took - self._seconds)
        finally:
            self.inside -= 1

    def _retry_after(self) -> int:
        """Whole seconds until about half of the admitted requests are done."""
        return min(60, max(1, math.ceil(self._seconds * self.inside / self._workers / 2)))
