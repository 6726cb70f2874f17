"""`Limiter`: waits for permits, in tasks and in threads, on behalf of a pure state machine that decides who gets one.

Invariant: a waiter that is cancelled or times out leaves no permit behind, also when it was granted in that very
moment; permits go to waiters in the order in which they asked, whether those are tasks (of any event loop) or threads.
Order, numbers and expiry are the state machine's (`Core`): `fifo` in one process, `holder` in a cluster.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

Granted = list[tuple["Ticket", Any]]


class Core(Protocol):
    """What decides; called under the limiter's lock, with the time."""

    @property
    def head(self) -> Ticket | None:
        """The ticket that is served next."""
        ...

    def take(self, now: float) -> Any | None:
        """A lease if one is free and nobody waits."""
        ...

    def enter(self, ticket: Ticket, now: float) -> Granted:
        """Puts the ticket at the end of the queue."""
        ...

    def cancel(self, ticket: Ticket, now: float) -> Granted:
        """Forgets a waiting ticket."""
        ...

    def release(self, lease: Any, now: float, unused: bool = False) -> Granted:
        """Takes a lease back; an `unused` one never reached its waiter."""
        ...

    def advance(self, now: float) -> Granted:
        """Grants what time has made possible."""
        ...

    def next_event(self) -> float | None:
        """When `advance` should be called."""
        ...


class Permit:
    """The right to do one thing now. `release` it when that is done, or use it as a context manager."""

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
    """A waiter's place in the queue."""

    __slots__ = ("error", "lease")

    def __init__(self) -> None:
        self.lease: Any | None = None
        self.error: BaseException | None = None

    def wake(self, after: float = 0.0, then: Callable[[], None] | None = None) -> bool:
        """Lets the waiter go on, or has it call `then` in `after` seconds; False if it is gone."""
        raise NotImplementedError

    def is_there(self) -> bool:
        """False for a task whose event loop was closed under it."""
        return True


class _TaskTicket(Ticket):
    __slots__ = ("future", "loop", "timer")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.timer: asyncio.TimerHandle | None = None

    def wake(self, after: float = 0.0, then: Callable[[], None] | None = None) -> bool:
        try:
            self.loop.call_soon_threadsafe(self._done if then is None else lambda: self._arm(after, then))
        except RuntimeError:  # the loop is closed
            return False
        return True

    def is_there(self) -> bool:
        return not self.loop.is_closed()

    def _done(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def _arm(self, after: float, then: Callable[[], None]) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.future.done():
            self.timer = self.loop.call_later(after, then)


class _ThreadTicket(Ticket):
    __slots__ = ("_alarm", "_bell")

    def __init__(self) -> None:
        super().__init__()
        self._bell = threading.Semaphore(0)
        self._alarm: tuple[float, Callable[[], None]] | None = None  # one attribute, so that it changes in one step

    def wake(self, after: float = 0.0, then: Callable[[], None] | None = None) -> bool:
        self._alarm = None if then is None else (time.monotonic() + after, then)
        self._bell.release()
        return True

    def wait(self, deadline: float | None) -> None:
        """Until the ticket has a lease or an error, or `deadline` (of `time.monotonic`) has passed."""
        while self.lease is None and self.error is None:
            alarm, now = self._alarm, time.monotonic()
            if deadline is not None and deadline <= now:
                return
            if alarm is not None and alarm[0] <= now:
                self._alarm = None  # an alarm set between these lines is set again by what `then` does
                alarm[1]()
                continue
            ends = [at for at in (deadline, alarm[0] if alarm else None) if at is not None]
            self._bell.acquire(timeout=min(ends) - now if ends else None)


class Limiter:
    """Hands out permits: `async with limiter.permit():` in a task, `with limiter.permit():` in a thread."""

    def __init__(self, core: Core, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self._lock = threading.Lock()
        self._armed: tuple[Ticket, float] | None = None

    def permit(self, timeout: float | None = None) -> Holding:
        """A context manager, asynchronous and plain, that holds a permit; waits at most `timeout` seconds for it."""
        return Holding(self, timeout)

    async def acquire(self, timeout: float | None = None) -> Permit:
        """Waits for a permit.

        Raises:
            TimeoutError: none within `timeout` seconds (None: however long it takes).
            InfrastructureError: whoever keeps the limit is gone.
        """
        lease = self._at_once()
        if lease is None:
            ticket = _TaskTicket()
            if self._enter(ticket):
                try:
                    if timeout is None:
                        await ticket.future
                    else:
                        await asyncio.wait({ticket.future}, timeout=timeout)
                except BaseException:
                    self._abandon(ticket)
                    raise
                finally:
                    if ticket.timer is not None:
                        ticket.timer.cancel()
            lease = self._outcome(ticket, timeout)
        return Permit(self, lease)

    def acquire_blocking(self, timeout: float | None = None) -> Permit:
        """As `acquire`, for threads; must not be called in an event loop's thread."""
        lease = self._at_once()
        if lease is None:
            ticket = _ThreadTicket()
            if self._enter(ticket):
                try:
                    ticket.wait(None if timeout is None else time.monotonic() + timeout)
                except BaseException:  # Ctrl-C
                    self._abandon(ticket)
                    raise
            lease = self._outcome(ticket, timeout)
        return Permit(self, lease)

    def try_acquire(self) -> Permit | None:
        """A permit if one is free at this moment and nobody waits, else None."""
        lease = self._at_once()
        return None if lease is None else Permit(self, lease)

    def _at_once(self) -> Any | None:
        """A lease without a ticket, the common case."""
        with self._lock:
            lease = self._core.take(self._clock())
            self._after()
            return lease

    def _enter(self, ticket: Ticket) -> bool:
        """Queues `ticket`; False if it was granted on the way."""
        with self._lock:
            self._deliver(self._core.enter(ticket, self._clock()))
            return ticket.lease is None

    def _outcome(self, ticket: Ticket, timeout: float | None) -> Any:
        with self._lock:
            if ticket.lease is not None:
                return ticket.lease
            self._deliver(self._core.cancel(ticket, self._clock()))
        if ticket.error is not None:
            raise ticket.error
        raise TimeoutError(f"no permit within {timeout:g} s")

    def _abandon(self, ticket: Ticket) -> None:
        with self._lock:
            lease, now = ticket.lease, self._clock()
            self._deliver(
                self._core.cancel(ticket, now) if lease is None else self._core.release(lease, now, unused=True)
            )

    def _release(self, lease: Any) -> None:
        with self._lock:
            self._deliver(self._core.release(lease, self._clock()))

    def _advance(self) -> None:
        with self._lock:
            self._armed = None
            self._deliver(self._core.advance(self._clock()))

    def _deliver(self, granted: Granted) -> None:
        """Hands leases to their tickets; one whose waiter is gone passes its lease on."""
        while granted:
            returned: Granted = []
            for ticket, lease in granted:
                ticket.lease = lease
                if not ticket.wake():
                    returned += self._core.release(lease, self._clock(), unused=True)
            granted = returned
        self._after()

    def _after(self) -> None:
        """Ends every call of the core: where time alone will serve the next in line, it shall call when that is due."""
        while (due := self._core.next_event()) is not None:
            head = self._core.head
            if head is None or (self._armed == (head, due) and head.is_there()):
                return
            self._armed = (head, due)
            if head.wake(max(0.0, due - self._clock()), self._advance):
                return
            if granted := self._core.cancel(head, self._clock()):
                return self._deliver(granted)


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
