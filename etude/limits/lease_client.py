"""`LeaseClient`: this process's leased permits of a cluster-wide limit, and its waiters; a pure state machine.

Invariants
- A waiter gets a permit only while its lease is surely valid: the client counts `lease_seconds` from when it *sent* the
  last answered report, the server from when it received it.
- While other processes wait (the server says so), a free permit returns to the server at once; otherwise it is kept for
  the next waiter of this process, until none was used for `IDLE_SECONDS`. Under a rate limit nothing is kept.
- Waiters of the process are served in the order in which they asked.

It is the `Core` of a `Limiter`; sending its reports to the server is left to `cluster`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from etude.limits.lease_server import Reply, Report
from etude.limits.limit import Limit

T = TypeVar("T", bound=Hashable)

IDLE_SECONDS = 1.0


class LeaseClient(Generic[T]):
    """Hands permits to tickets. `new_name` returns a unique client name."""

    def __init__(self, limit: Limit, lease_seconds: float, new_name: Callable[[], str]) -> None:
        self._limit = limit
        self._lease_seconds = lease_seconds
        self._new_name = new_name
        self._waiters: OrderedDict[T, None] = OrderedDict()
        self._ids = itertools.count(1)
        self._begin()

    def _begin(self) -> None:
        """Starts over under a new name, without reports or grants; permits in use no longer count."""
        self.name = self._new_name()
        self.known = False
        self._number = self._version = self._granted = self._returned = self._unused = 0
        self._used: set[int] = set()
        self._idle = 0
        self._taken_at = self._valid_until = float("-inf")
        self._crowded = False
        self.has_news = bool(self._waiters)
        """Whether something urgent must be reported to the server."""

    @property
    def held(self) -> int:
        """The number of permits in use in this process."""
        return len(self._used)

    @property
    def idle(self) -> int:
        """The number of permits kept for the next waiter."""
        return self._idle

    @property
    def waiting(self) -> int:
        """The number of waiting tickets."""
        return len(self._waiters)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is held, waited for or left to report."""
        return not (self._used or self._idle or self._waiters or self.has_news)

    def take(self, now: float) -> int | None:
        """A kept permit if there is one and no ticket waits, else None."""
        if self._waiters or not self._idle or now >= self._valid_until:
            return None
        self._taken_at = now
        return self._use()

    def enter(self, ticket: T, now: float) -> list[tuple[T, int]]:
        """Enqueues `ticket`."""
        self._waiters[ticket] = None
        granted = self._serve(now)
        self.has_news |= not granted
        return granted

    def cancel(self, ticket: T, now: float) -> list[tuple[T, int]]:
        """Removes a waiting ticket; ignores one that does not wait."""
        if ticket in self._waiters:
            del self._waiters[ticket]
            self.has_news = True
        return []

    def release(self, lease: int, now: float, unused: bool = False) -> list[tuple[T, int]]:
        """Takes a permit back; ignores one that is not valid (any more)."""
        if self._limit.max_concurrent is None:
            if unused:
                self._unused += 1
                self.has_news = True
        elif lease in self._used:
            self._used.discard(lease)
            if self._keeps_nothing:
                self._give_back(1, unused)
            else:
                self._idle += 1
                self._taken_at = now
        granted = self._serve(now)
        self.has_news |= bool(granted)  # one place fewer is needed in the server's queue
        return granted

    def advance(self, now: float) -> list[tuple[T, int]]:
        """Returns permits that were idle for too long."""
        if self._idle and now >= self._taken_at + IDLE_SECONDS:
            self._give_back(self._idle, unused=True)
            self._idle = 0
        return []

    def next_event(self) -> float | None:
        """When `advance` may have permits to return; waiters are served by replies, never by time alone."""
        return self._taken_at + IDLE_SECONDS if self._idle else None

    def report(self, now: float, leaves: bool = False) -> Report:
        """This client's state, for the server."""
        self._number += 1
        self.has_news = False
        return Report(
            client=self.name,
            number=self._number,
            version=self._version,
            granted=self._granted,
            returned=self._returned,
            unused=self._unused,
            waiting=max(0, len(self._waiters) - self._idle),
            in_force=now < self._valid_until,
            leaves=leaves,
        )

    def hear(self, reply: Reply, sent_at: float, now: float) -> list[tuple[T, int]]:
        """Applies the reply to a report sent at `sent_at`."""
        if reply.client != self.name:
            return []
        if not reply.known:
            self._begin()
            return []
        self.known = True
        self._valid_until = max(self._valid_until, sent_at + self._lease_seconds)
        if reply.version > self._version:  # otherwise a newer one overtook it
            self._version, self._crowded = reply.version, reply.crowded
            self._idle += reply.granted - self._granted
            self._granted = reply.granted
            self._taken_at = now
        return self._serve(now)

    def leave(self, now: float) -> Report:
        """The last report under this name: everything returns at once. The client remains usable."""
        report = self.report(now, leaves=True)
        self._begin()
        return report

    def fail(self) -> list[T]:
        """Removes and returns all waiters."""
        tickets = list(self._waiters)
        self._waiters.clear()
        self.has_news = bool(tickets)
        return tickets

    @property
    def _keeps_nothing(self) -> bool:
        return self._crowded or self._limit.per_second is not None

    def _serve(self, now: float) -> list[tuple[T, int]]:
        """Hands free permits to waiters; returns the rest if nothing may be kept."""
        granted: list[tuple[T, int]] = []
        while self._waiters and self._idle and now < self._valid_until:
            ticket, _ = self._waiters.popitem(last=False)
            granted.append((ticket, self._use()))
        if not self._waiters and self._idle and self._keeps_nothing:
            self._give_back(self._idle, unused=True)
            self._idle = 0
        return granted

    def _use(self) -> int:
        self._idle -= 1
        lease = next(self._ids)
        if self._limit.max_concurrent is None:
            self._returned += 1  # nothing of it is held
        else:
            self._used.add(lease)
        return lease

    def _give_back(self, count: int, unused: bool) -> None:
        self._returned += count
        self._unused += count if unused else 0
        self.has_news = True
