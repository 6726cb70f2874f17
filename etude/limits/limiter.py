"""`Limiter`: lets tasks and threads wait for permits, granted by a pure state machine.

Invariant: a waiter that is cancelled or times out leaks no permit, not even one granted at that moment;
permits go to waiters in the order in which they asked, whether those are tasks (of any event loop) or threads.
Order, numbers and expiry are the state machine's (`Core`): `fifo` in one process, `lease_client` in a cluster.
"""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType
from typing import Any, Protocol

from etude.bounded import background_loop, wake

Granted = list[tuple["Ticket", Any]]


class Core(Protocol):
    """The state machine; called under the limiter's lock, with the time. A lease is what a granted ticket holds."""

    def take(self, now: float) -> Any | None:
        """A lease if one is free and no ticket waits."""
        ...

    def enter(self, ticket: Ticket, now: float) -> Granted:
        """Enqueues the ticket."""
        ...

    def cancel(self, ticket: Ticket, now: float) -> Granted:
        """Removes a waiting ticket."""
        ...

    def release(self, lease: Any, now: float, unused: bool = False) -> Granted:
        """Takes a lease back; an `unused` one never reached its waiter."""
        ...

    def advance(self, now: float) -> Granted:
        """Applies what is due by time alone."""
        ...

    def next_event(self) -> float | None:
        """When `advance` should be called."""
        ...


class Permit:
    """One granted permit. `release` it when done, or use it as a context manager."""

    __slots__ = ("_lease", "_limiter")

    def __init__(self, limiter: Limiter, lease: Any) -> None:
        self._limiter: Limiter | None = limiter
        self._lease = lease

    def release(self) -> None:
        """Gives the permit back, from any thread; a second time does nothing."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter._release(self._lease)

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Ticket:
    """A place in the queue: of a task of `loop`, or of a thread (None)."""

    __slots__ = ("_loop", "error", "lease", "woken")

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.lease: Any | None = None
        self.error: BaseException | None = None
        self.woken: Any = threading.Event() if loop is None else loop.create_future()
        self._loop = loop

    def wake(self) -> bool:
        """Wakes the waiter; False if its event loop was closed meanwhile."""
        try:
            if self._loop is None:
                self.woken.set()
            else:
                self._loop.call_soon_threadsafe(wake, self.woken)
        except RuntimeError:  # the loop is closed
            return False
        return True


class Limiter:
    """Hands out permits: `async with limiter.permit():` in a task, `with limiter.permit():` in a thread."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._due: float | None = None  # when `_advance` is called next

    def permit(self, timeout: float | None = None) -> Holding:
        """A context manager, async and sync, that holds a permit; waits at most `timeout` seconds for it."""
        return Holding(self, timeout)

    async def acquire(self, timeout: float | None = None) -> Permit:
        """Waits for a permit.

        Raises:
            TimeoutError: none within `timeout` seconds (None: no limit).
            InfrastructureError: the actor that keeps the limit is gone.
        """
        lease = self._take()
        if lease is None:
            ticket = Ticket(asyncio.get_running_loop())
            if self._enter(ticket):
                try:
                    if timeout is None:
                        await ticket.woken
                    else:
                        await asyncio.wait({ticket.woken}, timeout=timeout)
                except BaseException:
                    self._abandon(ticket)
                    raise
            lease = self._outcome(ticket, timeout)
        return Permit(self, lease)

    def acquire_blocking(self, timeout: float | None = None) -> Permit:
        """Like `acquire`, for threads; must not be called in an event loop's thread."""
        lease = self._take()
        if lease is None:
            ticket = Ticket(None)
            if self._enter(ticket):
                try:
                    ticket.woken.wait(timeout)
                except BaseException:  # Ctrl-C
                    self._abandon(ticket)
                    raise
            lease = self._outcome(ticket, timeout)
        return Permit(self, lease)

    def try_acquire(self) -> Permit | None:
        """A permit if one is free now and no waiter is queued, else None."""
        lease = self._take()
        return None if lease is None else Permit(self, lease)

    def _take(self) -> Any | None:
        """A lease without a ticket, the common case."""
        with self._lock:
            lease = self._core.take(time.monotonic())
            self._after()
            return lease

    def _enter(self, ticket: Ticket) -> bool:
        """Queues `ticket`; False if it was granted immediately."""
        with self._lock:
            self._deliver(self._core.enter(ticket, time.monotonic()))
            return ticket.lease is None

    def _outcome(self, ticket: Ticket, timeout: float | None) -> Any:
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

    def _release(self, lease: Any) -> None:
        with self._lock:
            self._deliver(self._core.release(lease, time.monotonic()))

    def _advance(self, due: float) -> None:
        with self._lock:
            if self._due == due:
                self._due = None
            self._deliver(self._core.advance(time.monotonic()))

    def _deliver(self, granted: Granted) -> None:
        """Hands leases to their tickets; one whose waiter is gone passes its lease on."""
        while granted:
            returned: Granted = []
            for ticket, lease in granted:
                ticket.lease = lease
                if not ticket.wake():
                    returned += self._core.release(lease, time.monotonic(), unused=True)
            granted = returned
        self._after()

    def _after(self) -> None:
        """Follows every call of the core: arms a timer if something is due earlier than the armed one.

        A timer that fires too early finds nothing to do and is armed again, so that short-lived permits need not
        move it each time.
        """
        due = self._core.next_event()
        if due is not None and (self._due is None or due < self._due):
            self._due = due
            loop = background_loop("etude-limits")
            loop.call_soon_threadsafe(lambda: loop.call_later(max(0.0, due - time.monotonic()), self._advance, due))


class Holding:
    """A permit for the length of a block."""

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
