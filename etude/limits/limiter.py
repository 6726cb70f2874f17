"""`Limiter`: lets tasks and threads wait for permits that a pure state machine grants; `LocalLimiter`: limits one process.

Invariant: a waiter that is cancelled or times out leaks no permit, not even one granted at that moment. Permits are granted
in the order in which waiters asked, whether those are tasks (of any event loop) or threads. Order, counts and expiry are
left to the state machine: `Fifo` in one process, `LeaseClient` (`lease`) in a cluster.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from types import TracebackType
from typing import Any, Generic, TypeVar

from etude.bounded import background_loop, wake
from etude.errors import ConfigError
from etude.limits.limit import Limit, TokenBucket

T = TypeVar("T", bound=Hashable)


class WaitQueue(Generic[T]):
    """Grants leases (unique numbers) to tickets (hashable objects of the caller's choice), first come, first served, and
    never to a cancelled one. The caller passes the time. A subclass decides when a lease is free."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[T, None] = OrderedDict()
        self._held: set[int] = set()
        self._leases = 0

    @property
    def held(self) -> int:
        """The number of permits in use in this process; 0 if only the rate is limited."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """The number of waiting tickets."""
        return len(self._waiting)

    def take(self, now: float) -> int | None:
        """Returns a lease if one is free and no ticket waits, else None."""
        return None if self._waiting else self._grant(now)

    def enter(self, ticket: T, now: float) -> list[tuple[T, int]]:
        """Enqueues `ticket`; returns the grants that are possible now, (ticket, lease)."""
        self._waiting[ticket] = None
        return self.advance(now)

    def cancel(self, ticket: T, now: float) -> list[tuple[T, int]]:
        """Removes `ticket` if it is waiting; returns the grants that are possible now."""
        self._waiting.pop(ticket, None)
        return self.advance(now)

    def release(self, lease: int, now: float, unused: bool = False) -> list[tuple[T, int]]:
        """Ends a lease, if it is held; returns the grants that are possible now.

        An `unused` lease, which never reached its waiter, does not count against the rate.
        """
        raise NotImplementedError

    def advance(self, now: float) -> list[tuple[T, int]]:
        """Grants free leases to waiting tickets, in order."""
        granted: list[tuple[T, int]] = []
        while self._waiting and (lease := self._grant(now)) is not None:
            granted.append((self._waiting.popitem(last=False)[0], lease))
        return granted

    def next_event(self) -> float | None:
        """Returns the time at which `advance` next has something to do, if nothing else happens; None for never."""
        raise NotImplementedError

    def _grant(self, now: float) -> int | None:
        """Returns a new lease if one is free, else None."""
        raise NotImplementedError


class Fifo(WaitQueue[T]):
    """Enforces a `Limit` in one process; under a pure rate limit, leases need not be released."""

    def __init__(self, limit: Limit, now: float) -> None:
        super().__init__()
        self._limit = limit
        self._bucket = TokenBucket(limit.per_second, limit.bucket_size, now) if limit.per_second else None

    def release(self, lease: int, now: float, unused: bool = False) -> list[tuple[T, int]]:
        if unused and self._bucket is not None:
            self._bucket.put_back()
        self._held.discard(lease)
        return self.advance(now)

    def next_event(self) -> float | None:
        return self._bucket.ready_at() if self._waiting and self._bucket is not None and not self._is_full() else None

    def _is_full(self) -> bool:
        return self._limit.max_concurrent is not None and len(self._held) >= self._limit.max_concurrent

    def _grant(self, now: float) -> int | None:
        if self._is_full() or (self._bucket is not None and not self._bucket.take(now)):
            return None
        self._leases += 1
        if self._limit.max_concurrent is not None:
            self._held.add(self._leases)
        return self._leases


class Permit:
    """A granted permit; call `release` when done, or use it as a context manager."""

    __slots__ = ("_lease", "_limiter")

    def __init__(self, limiter: Limiter, lease: int) -> None:
        self._limiter: Limiter | None = limiter
        self._lease = lease

    def release(self) -> None:
        """Returns the permit, from any thread; a second call does nothing."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter._release(self._lease)

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Ticket:
    """A waiter's place in the queue: a task of `loop`, or a thread if `loop` is None."""

    __slots__ = ("_loop", "error", "lease", "wakeup")

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.lease: int | None = None
        self.error: BaseException | None = None
        self.wakeup: Any = threading.Event() if loop is None else loop.create_future()
        self._loop = loop

    def wake(self) -> bool:
        """Wakes the waiter; returns False if its event loop has been closed."""
        try:
            if self._loop is None:
                self.wakeup.set()
            else:
                self._loop.call_soon_threadsafe(wake, self.wakeup)
        except RuntimeError:  # the loop is closed
            return False
        return True


class Limiter:
    """Grants permits: `async with limiter.permit():` in a task, `with limiter.permit():` in a thread."""

    def __init__(self, core: WaitQueue[Ticket]) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._due: float | None = None  # when the armed timer calls `_advance`

    @property
    def held(self) -> int:
        """The number of permits in use in this process; 0 if only the rate is limited."""
        return self._core.held

    @property
    def waiting(self) -> int:
        """The number of tasks and threads of this process that are waiting."""
        return self._core.waiting

    def permit(self, timeout: float | None = None) -> HeldPermit:
        """Returns a context manager, async and sync, that holds a permit; it waits up to `timeout` seconds for one."""
        return HeldPermit(self, timeout)

    def is_current(self) -> bool:
        """Whether the limiter is still in force for this process; if not, open it again with `open_limiter`."""
        return True

    async def acquire(self, timeout: float | None = None) -> Permit:
        """Waits for a permit.

        Raises:
            TimeoutError: no permit within `timeout` seconds (None: no timeout).
            InfrastructureError: the actor that enforces the limit is gone.
        """
        lease = self._take()
        if lease is None:
            ticket = Ticket(asyncio.get_running_loop())
            if self._enter(ticket):
                try:
                    if timeout is None:
                        await ticket.wakeup
                    else:
                        await asyncio.wait({ticket.wakeup}, timeout=timeout)
                except BaseException:
                    self._abandon(ticket)
                    raise
            lease = self._outcome(ticket, timeout)
        return Permit(self, lease)

    def acquire_blocking(self, timeout: float | None = None) -> Permit:
        """Like `acquire`, for threads; must not be called in the thread of an event loop."""
        lease = self._take()
        if lease is None:
            ticket = Ticket(None)
            if self._enter(ticket):
                try:
                    ticket.wakeup.wait(timeout)
                except BaseException:  # Ctrl-C
                    self._abandon(ticket)
                    raise
            lease = self._outcome(ticket, timeout)
        return Permit(self, lease)

    def try_acquire(self) -> Permit | None:
        """Returns a permit if one is free now and no waiter is queued, else None."""
        lease = self._take()
        return None if lease is None else Permit(self, lease)

    def _take(self) -> int | None:
        """Returns a lease without queueing a ticket, if one is free: the fast path."""
        with self._lock:
            lease = self._core.take(time.monotonic())
            self._after()
            return lease

    def _enter(self, ticket: Ticket) -> bool:
        """Enqueues `ticket`; returns False if a lease was granted immediately."""
        with self._lock:
            self._deliver(self._core.enter(ticket, time.monotonic()))
            return ticket.lease is None

    def _outcome(self, ticket: Ticket, timeout: float | None) -> int:
        with self._lock:
            if ticket.lease is not None:
                return ticket.lease
            self._deliver(self._core.cancel(ticket, time.monotonic()))
        if ticket.error is not None:
            raise ticket.error
        raise TimeoutError(f"no permit within {timeout:g} s")

    def _abandon(self, ticket: Ticket) -> None:
        with self._lock:
            lease, now = ticket.lease, time.monotonic()
            self._deliver(
                self._core.cancel(ticket, now) if lease is None else self._core.release(lease, now, unused=True)
            )

    def _release(self, lease: int) -> None:
        with self._lock:
            self._deliver(self._core.release(lease, time.monotonic()))

    def _advance(self, due: float) -> None:
        with self._lock:
            if self._due == due:
                self._due = None
            self._deliver(self._core.advance(time.monotonic()))

    def _deliver(self, granted: list[tuple[Ticket, int]]) -> None:
        """Assigns leases to their tickets and wakes the waiters; the lease of a waiter that is gone goes to the next."""
        while granted:
            returned: list[tuple[Ticket, int]] = []
            for ticket, lease in granted:
                ticket.lease = lease
                if not ticket.wake():
                    returned += self._core.release(lease, time.monotonic(), unused=True)
            granted = returned
        self._after()

    def _after(self) -> None:
        """Runs after every call of the core: arms a timer if the next event is due before the armed one.

        A timer that fires too early finds nothing to do and is armed again, so that short-lived permits need not
        reschedule it each time.
        """
        due = self._core.next_event()
        if due is not None and (self._due is None or due < self._due):
            self._due = due
            loop = background_loop("etude-limits")
            loop.call_soon_threadsafe(lambda: loop.call_later(max(0.0, due - time.monotonic()), self._advance, due))


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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__()

    def __enter__(self) -> Permit:
        self._permit = self._limiter.acquire_blocking(self._timeout)
        return self._permit

    def __exit__(self, *_: object) -> None:
        if self._permit is not None:
            self._permit.release()


class LocalLimiter(Limiter):
    """Enforces a `Limit` among the tasks and threads of this process, first come, first served."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        super().__init__(Fifo(limit, time.monotonic()))


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
