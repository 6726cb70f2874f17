"""Limits within one process: `ConcurrencyLimit` (n at once), `RateLimit` (n a second), `LocalLimiter` (either or both).

Invariant: the interface is that of the cluster-wide limiter, so that what works under one works under the other; a name
is one limit, and opening it with another limit is an error.
"""

from __future__ import annotations

import threading
import time
import weakref

from etude.errors import ConfigError
from etude.limits.fifo import Fifo
from etude.limits.limit import Limit
from etude.limits.limiter import Limiter, Ticket


class LocalLimiter(Limiter):
    """Enforces a `Limit` among the tasks and threads of this process, first come, first served."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._fifo: Fifo[Ticket] = Fifo(limit, time.monotonic())
        super().__init__(self._fifo)

    @property
    def held(self) -> int:
        """The number of permits in use; 0 if only the rate is limited."""
        return self._fifo.held

    @property
    def waiting(self) -> int:
        """The number of waiting tasks and threads."""
        return self._fifo.waiting


class ConcurrencyLimit(LocalLimiter):
    """At most `n` permits in use at once."""

    def __init__(self, n: int) -> None:
        super().__init__(Limit(max_concurrent=n))


class RateLimit(LocalLimiter):
    """At most `per_second` permits a second, and `burst` (default: `per_second` rounded up) at once.

    A permit of it need not be released: `await limit.acquire()` is enough.
    """

    def __init__(self, per_second: float, burst: int | None = None) -> None:
        super().__init__(Limit(per_second=per_second, burst=burst))


_named: weakref.WeakValueDictionary[str, LocalLimiter] = weakref.WeakValueDictionary()
_named_lock = threading.Lock()


def local_limiter(name: str, limit: Limit) -> LocalLimiter:
    """The limiter `name` of this process, which lives as long as it is referenced.

    Raises:
        ConfigError: the name is taken by another limit.
    """
    with _named_lock:
        limiter = _named.get(name)
        if limiter is None:
            limiter = _named[name] = LocalLimiter(limit)
    refuse_conflict(name, limiter.limit, limit)
    return limiter


def refuse_conflict(name: str, held: Limit, asked: Limit) -> None:
    """Raises ConfigError if a limiter's name is taken by another limit."""
    if held != asked:
        raise ConfigError(
            f"the limiter '{name}' allows {held} already; {asked} is asked for: use one limit or two names"
        )
