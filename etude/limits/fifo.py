"""`Fifo`: the limiter of one process as a pure state machine; the caller passes the time.

Invariant: permits go to tickets in the order in which they asked; never more than `max_concurrent` are out; a ticket
that is cancelled never gets one. Waiting, waking and threads are left to `limiter`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from etude.limits.limit import Limit, TokenBucket

T = TypeVar("T", bound=Hashable)

Lease = int
"""The lease of a granted ticket: a unique number. Under a pure rate limit it need not be returned."""


class Fifo(Generic[T]):
    """Grants leases to tickets (hashable objects of the caller's)."""

    def __init__(self, limit: Limit, now: float) -> None:
        self._limit = limit
        self._bucket = TokenBucket(limit.per_second, limit.bucket_size, now) if limit.per_second else None
        self._waiting: OrderedDict[T, None] = OrderedDict()
        self._held: set[Lease] = set()
        self._leases = 0

    @property
    def held(self) -> int:
        """The number of permits in use; 0 if only the rate is limited."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """The number of waiting tickets."""
        return len(self._waiting)

    def take(self, now: float) -> Lease | None:
        """A lease if one is free and no ticket waits, else None."""
        return self._lease() if not self._waiting and self._take(now) else None

    def enter(self, ticket: T, now: float) -> list[tuple[T, Lease]]:
        """Enqueues `ticket`; returns what is granted now, perhaps to it."""
        self._waiting[ticket] = None
        return self.advance(now)

    def cancel(self, ticket: T, now: float) -> list[tuple[T, Lease]]:
        """Removes a waiting ticket; ignores one that does not wait. Returns the grants that this made possible."""
        self._waiting.pop(ticket, None)
        return self.advance(now)

    def release(self, lease: Lease, now: float, unused: bool = False) -> list[tuple[T, Lease]]:
        """Returns a lease; one that is not out is ignored. Returns what was granted to waiting tickets.

        An `unused` one, which never reached its waiter, does not count against the rate.
        """
        if unused and self._bucket is not None:
            self._bucket.put_back()
        self._held.discard(lease)
        return self.advance(now)

    def advance(self, now: float) -> list[tuple[T, Lease]]:
        """Grants what is possible now, in order."""
        granted: list[tuple[T, Lease]] = []
        while self._waiting and self._take(now):
            ticket, _ = self._waiting.popitem(last=False)
            granted.append((ticket, self._lease()))
        return granted

    def next_event(self) -> float | None:
        """When `advance` can next grant something by time alone; None if that needs a release or no ticket waits."""
        if not self._waiting or self._bucket is None or self._full():
            return None
        return self._bucket.ready_at()

    def _full(self) -> bool:
        return self._limit.max_concurrent is not None and len(self._held) >= self._limit.max_concurrent

    def _take(self, now: float) -> bool:
        return not self._full() and (self._bucket is None or self._bucket.take(now))

    def _lease(self) -> Lease:
        self._leases += 1
        if self._limit.max_concurrent is not None:
            self._held.add(self._leases)
        return self._leases
