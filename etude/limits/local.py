"""Limits within a process: `Limit` says what is allowed, `LocalLimiter` keeps it.

Invariant: permits are granted first come, first served, to tasks (of any event loop) and threads alike, never more at once
or a second than the `Limit` says. A waiter that is cancelled or times out leaks no permit, not even one granted at that
moment. Permits that cross processes, and expire with them, are left to `cluster`.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections import OrderedDict
from concurrent import futures
from dataclasses import dataclass

from etude.errors import ConfigError
from etude.timeouts import background_loop

_NEARLY_ONE = 1 - 1e-9  # the rounding errors of many small refills must not cost a token


@dataclass(frozen=True)
class Limit:
    """At most `max_concurrent` permits in use at once, and at most `per_second` granted per second; at least one is set.

    `burst` (default: `per_second` rounded up) is how many may be granted at once after a pause.

    Raises:
        ConfigError: a number is not positive, or nothing is limited.
    """

    max_concurrent: int | None = None
    per_second: float | None = None
    burst: int | None = None

    def __post_init__(self) -> None:
        if self.max_concurrent is None and self.per_second is None:
            raise ConfigError("a limit needs max_concurrent, per_second or both")
        for name, value in (("max_concurrent", self.max_concurrent), ("burst", self.burst)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be a whole number from 1, not {value!r}")
        if self.per_second is None and self.burst is not None:
            raise ConfigError("burst says how many at one moment of per_second, which is not set")
        if self.per_second is not None:
            good = isinstance(self.per_second, int | float) and not isinstance(self.per_second, bool)
            if not good or not 0 < self.per_second < math.inf:
                raise ConfigError(f"per_second must be a number above 0, not {self.per_second!r}")

    @property
    def bucket_size(self) -> int:
        """The number of permits in a full bucket; 0 without a rate limit."""
        if self.per_second is None:
            return 0
        return self.burst or max(1, math.ceil(self.per_second))

    def __str__(self) -> str:
        parts = [] if self.max_concurrent is None else [f"{self.max_concurrent} at once"]
        if self.per_second is not None:
            parts.append(f"{self.per_second:g} a second (bursts of {self.bucket_size})")
        return ", ".join(parts)


class Permit:
    """A place in a limiter's queue and, once it is granted, the right to go on. `release` gives up either, from any thread;
    a second call does nothing."""

    __slots__ = ("_limiter", "_loop", "outcome", "ticket")

    def __init__(self, limiter: Limiter, loop: asyncio.AbstractEventLoop | None = None, ticket: str = "") -> None:
        self._limiter, self._loop = limiter, loop
        self.ticket = ticket
        """Its name in the cluster."""
        self.outcome: futures.Future[Exception | None] = futures.Future()
        """Done with None when the permit is granted, or with the reason why it never will be."""
        self.outcome.set_running_or_notify_cancel()  # only `release` withdraws it

    @property
    def is_abandoned(self) -> bool:
        """Whether the event loop of the task that waits was closed."""
        return self._loop is not None and self._loop.is_closed()

    def release(self) -> None:
        """Returns the permit, or leaves the queue."""
        self._limiter._withdraw(self)

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Limiter:
    """Grants permits: `async with limiter.permit():` in a task, `with limiter.permit():` in a thread."""

    limit: Limit

    def enter(self, loop: asyncio.AbstractEventLoop | None = None) -> Permit:
        """Joins the queue, for a task of `loop` or a thread; the permit's `outcome` says when it is granted."""
        raise NotImplementedError

    def _withdraw(self, permit: Permit) -> None:
        raise NotImplementedError

    def is_current(self) -> bool:
        """Whether the limiter is still in force for this process; if not, open it again with `open_limiter`."""
        return True

    def permit(self, timeout: float | None = None) -> HeldPermit:
        """Returns a context manager, async and sync, that holds a permit; it waits up to `timeout` seconds for one."""
        return HeldPermit(self, timeout)

    async def acquire(self, timeout: float | None = None) -> Permit:
        """Waits for a permit.

        Raises:
            TimeoutError: no permit within `timeout` seconds (None: no timeout).
            InfrastructureError: the actor that keeps the limit is gone.
        """
        permit = self.enter(asyncio.get_running_loop())
        try:
            if not permit.outcome.done():
                await asyncio.wait({asyncio.wrap_future(permit.outcome)}, timeout=timeout)
            return _granted(permit, timeout)
        except BaseException:
            permit.release()
            raise

    def acquire_blocking(self, timeout: float | None = None) -> Permit:
        """Like `acquire`, in a thread that may block."""
        permit = self.enter()
        try:
            futures.wait([permit.outcome], timeout)
            return _granted(permit, timeout)
        except BaseException:
            permit.release()
            raise


def _granted(permit: Permit, timeout: float | None) -> Permit:
    """Returns the permit that was waited for, if it was granted."""
    if not permit.outcome.done():
        raise TimeoutError(f"no permit within {timeout:g} s")
    error = permit.outcome.result()
    if error is not None:
        raise error
    return permit


class HeldPermit:
    """Holds a permit for the duration of a `with` block."""

    __slots__ = ("_limiter", "_permit", "_timeout")

    def __init__(self, limiter: Limiter, timeout: float | None) -> None:
        self._limiter = limiter
        self._timeout = timeout
        self._permit: Permit | None = None

    async def __aenter__(self) -> Permit:
        self._permit = await self._limiter.acquire(self._timeout)
        return self._permit

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def __enter__(self) -> Permit:
        self._permit = self._limiter.acquire_blocking(self._timeout)
        return self._permit

    def __exit__(self, *_: object) -> None:
        if self._permit is not None:
            self._permit.release()


class LocalLimiter(Limiter):
    """Keeps a `Limit` among the tasks and threads of this process: a queue, a count and a token bucket."""

    def __init__(self, limit: Limit, paused: bool = False) -> None:
        self.limit = limit
        self.paused = paused
        """Whether nothing is granted until `resume`."""
        self._lock = threading.Lock()
        self._queue: OrderedDict[Permit, None] = OrderedDict()
        self._held: set[Permit] = set()
        self._tokens, self._filled_at = float(limit.bucket_size), time.monotonic()
        self._timed = False  # whether a timer is set for the next token

    @property
    def held(self) -> int:
        """The number of permits in use in this process; 0 if only the rate is limited."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """The number of tasks and threads of this process that are waiting."""
        return len(self._queue)

    def enter(self, loop: asyncio.AbstractEventLoop | None = None) -> Permit:
        permit = Permit(self, loop)
        with self._lock:
            self._queue[permit] = None
        self._grant()
        return permit

    def try_acquire(self) -> Permit | None:
        """Returns a permit if one is free now and nobody waits, else None."""
        permit = self.enter()
        if permit.outcome.done():
            return permit
        permit.release()
        return None

    def resume(self) -> None:
        """Grants to those who wait, if it was paused."""
        self.paused = False
        self._grant()

    def adopt(self) -> Permit:
        """Counts a permit that was granted elsewhere, even if it is one too many."""
        permit = Permit(self)
        permit.outcome.set_result(None)
        with self._lock:
            self._held.add(permit)
        return permit

    def _withdraw(self, permit: Permit) -> None:
        with self._lock:
            self._queue.pop(permit, None)
            self._held.discard(permit)
        self._grant()

    def _grant(self) -> None:
        """Grants what is free to those who wait, in order; sets a timer if they wait for the rate."""
        granted = []
        with self._lock:
            while self._queue and not self._is_full():
                permit = next(iter(self._queue))
                if not permit.is_abandoned and not self._take_token():
                    break
                del self._queue[permit]
                if permit.is_abandoned:
                    continue
                if self.limit.max_concurrent is not None:
                    self._held.add(permit)
                granted.append(permit)
            if self.limit.per_second and self._queue and not self._is_full() and not self._timed:
                self._timed = True
                loop = background_loop("etude-limits")
                delay = (1.0 - self._tokens) / self.limit.per_second
                loop.call_soon_threadsafe(loop.call_later, delay, self._on_timer)
        for permit in granted:
            permit.outcome.set_result(None)

    def _on_timer(self) -> None:
        self._timed = False
        self._grant()

    def _is_full(self) -> bool:
        full = self.limit.max_concurrent is not None and len(self._held) >= self.limit.max_concurrent
        return full or self.paused

    def _take_token(self) -> bool:
        if self.limit.per_second is None:
            return True
        now = time.monotonic()
        refill = (now - self._filled_at) * self.limit.per_second
        self._tokens, self._filled_at = min(float(self.limit.bucket_size), self._tokens + refill), now
        if self._tokens < _NEARLY_ONE:
            return False
        self._tokens -= 1.0
        return True


class ConcurrencyLimit(LocalLimiter):
    """At most `n` permits in use at once."""

    def __init__(self, n: int) -> None:
        super().__init__(Limit(max_concurrent=n))


class RateLimit(LocalLimiter):
    """At most `per_second` permits per second, and `burst` (default: `per_second` rounded up) at once after a pause.

    Its permits need not be released: `await limit.acquire()` is enough.
    """

    def __init__(self, per_second: float, burst: int | None = None) -> None:
        super().__init__(Limit(per_second=per_second, burst=burst))


_named: weakref.WeakValueDictionary[str, LocalLimiter] = weakref.WeakValueDictionary()
_named_lock = threading.Lock()


def local_limiter(name: str, limit: Limit) -> LocalLimiter:
    """Returns the limiter `name` of this process, which lives as long as it is referenced.

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
    """Raises ConfigError if the limiter `name` exists with another limit."""
    if held != asked:
        raise ConfigError(
            f"the limiter '{name}' allows {held} already; {asked} is asked for: use one limit or two names"
        )
