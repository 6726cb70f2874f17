"""Limits within one process: `ConcurrencyLimit` (n at once), `RateLimit` (n a second), `LocalLimiter` (either or both).

Invariant: the interface is that of the cluster-wide limiter, so that what works under one works under the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from etude.limits.fifo import Fifo
from etude.limits.limit import Limit
from etude.limits.limiter import Limiter, Ticket


class LocalLimiter(Limiter):
    """Enforces a `Limit` among the tasks and threads of this process, first come, first served."""

    def __init__(self, limit: Limit, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._fifo: Fifo[Ticket] = Fifo(limit, clock())
        super().__init__(self._fifo, clock)

    @property
    def held(self) -> int:
        """How many permits are out; 0 where only the rate is limited."""
        return self._fifo.held

    @property
    def waiting(self) -> int:
        """How many tasks and threads wait."""
        return self._fifo.waiting


class ConcurrencyLimit(LocalLimiter):
    """At most `n` permits out at once."""

    def __init__(self, n: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(Limit(max_concurrent=n), clock)


class RateLimit(LocalLimiter):
    """At most `per_second` permits a second, and `burst` (default: `per_second` rounded up) at one moment.

    A permit of it need not be released: `await limit.acquire()` is enough.
    """

    def __init__(
        self, per_second: float, burst: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(Limit(per_second=per_second, burst=burst), clock)
