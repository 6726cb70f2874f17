"""The protocol of a cluster-wide limit, as two pure state machines: `LeaseServer` tracks leases and the queue, `LeaseClient`
is the client of one process. The caller passes the time; sending messages is left to `cluster`.

The protocol is a single call. A client reports its *state* (running totals, never events), and the reply is the server's
state, so that lost, repeated or reordered messages do no harm: the next message contains everything.

Invariants
- Never more than `max_concurrent` permits are leased, and never more than the rate allows are granted.
- Places in the server's queue are served first come, first served. They belong to the client: when one of its waiters
  gives up, the client loses its last place. Waiters of a client are served in the order in which they asked.
- A client's leases end when it returns them, leaves, or sends no report for `lease_seconds`; nothing else ends them. A
  waiter gets a permit only while its lease is certain to be valid: the client counts `lease_seconds` from when it *sent* the
  last answered report, the server from when it received it.
- While other clients wait (the reply's `crowded`), a free permit is returned to the server at once; otherwise it is kept for
  the client's next waiter, until no permit has been used for `IDLE_SECONDS`. Under a rate limit no permit is kept.
"""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from etude.limits.limit import Limit, TokenBucket
from etude.limits.limiter import T, WaitQueue

IDLE_SECONDS = 1.0


@dataclass(frozen=True)
class Report:
    """A client's state. Any report renews all leases of the client; an outdated one (by `number`) does nothing else."""

    client: str
    number: int
    """Sequence number of the report, from 1."""
    version: int
    """Version of the last reply that the client applied."""
    granted: int
    """Total of permits granted to the client, as far as it knows."""
    returned: int
    """Total of permits that the client returned."""
    unused: int
    """Total of returned permits that were not used: they do not count against the rate."""
    waiting: int
    """Number of further permits that the client wants."""
    is_valid: bool
    """Whether the client's leases are certain not to have expired, so that a server that lost its state takes them over."""
    leaves: bool = False
    """Whether this is the last report: all leases of the client end now."""


@dataclass(frozen=True)
class Reply:
    """The server's state, as seen by one client."""

    client: str
    known: bool
    """False if the client's leases have ended: it must start over under a new name."""
    version: int = 0
    """Increases whenever `granted` or `crowded` changes."""
    granted: int = 0
    """Total of permits granted to the client."""
    crowded: bool = False
    """Whether other clients are waiting."""


@dataclass(frozen=True)
class LimiterInfo:
    """The limit and the state of a cluster-wide limiter."""

    limit: Limit
    lease_seconds: float
    held: int
    waiting: int
    clients: int


@dataclass
class _Client:
    name: str
    seen: float
    granted: int
    returned: int
    unused: int
    number: int = 0
    version: int = 0
    crowded: bool = False
    places: deque[int] = field(default_factory=deque)


class LeaseServer:
    """Grants leases to clients. A server that replaces a lost one is `settling`: for `lease_seconds` it grants nothing, and
    takes over the leases that clients report."""

    def __init__(self, limit: Limit, lease_seconds: float, now: float, settling: bool = False) -> None:
        self._limit = limit
        self._lease_seconds = lease_seconds
        self._opens_at = now + lease_seconds if settling else now
        self._bucket = TokenBucket(limit.per_second, limit.bucket_size, now) if limit.per_second else None
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # least recent report first
        self._queue: OrderedDict[int, _Client] = OrderedDict()  # by place
        self._places = itertools.count()
        self._held = 0

    def info(self) -> LimiterInfo:
        """Returns the limiter's state."""
        return LimiterInfo(self._limit, self._lease_seconds, self._held, len(self._queue), len(self._clients))

    def receive(self, report: Report, now: float) -> Reply:
        """Applies a report and returns the reply."""
        self.advance(now)
        client = self._admit(report, now)
        if client is not None and report.leaves:
            self._forget(client)
        elif client is not None:
            client.seen = now
            self._clients.move_to_end(client.name)
            if report.number > client.number:
                self._update(client, report)
        self._grant(now)
        return self.reply(report.client)

    def reply(self, name: str) -> Reply:
        """Returns the current reply to the client `name`."""
        client = self._clients.get(name)
        if client is None:
            return Reply(name, known=False)
        return Reply(name, True, client.version, client.granted, client.crowded)

    def advance(self, now: float) -> None:
        """Ends expired leases and grants free permits."""
        while self._clients and now >= (client := next(iter(self._clients.values()))).seen + self._lease_seconds:
            self._forget(client)
        self._grant(now)

    def next_event(self) -> float | None:
        """Returns the time at which `advance` next has something to do, if no report arrives; None for never."""
        due = [client.seen + self._lease_seconds for client in itertools.islice(self._clients.values(), 1)]
        if self._queue and self._free() > 0:
            due.append(max(self._opens_at, self._bucket.ready_at() if self._bucket else 0.0))
        return min(due, default=None)

    def _admit(self, report: Report, now: float) -> _Client | None:
        """Returns the report's client, new or known; None if it expired or claims permits that it cannot have."""
        settling = now < self._opens_at
        client = self._clients.get(report.client)
        if client is None:
            if report.number > 1 and not settling:
                return None
            client = _Client(report.client, now, report.returned, report.returned, report.unused)
            self._clients[report.client] = client
        claimed = report.granted - client.granted
        if claimed > 0:  # granted by the lost server
            if not (settling and report.is_valid) or claimed > self._free():
                self._forget(client)
                return None
            client.granted += claimed
            self._held += claimed
        if report.version > client.version:
            client.version = report.version + 1
        return client

    def _update(self, client: _Client, report: Report) -> None:
        client.number = report.number
        self._held -= report.returned - client.returned
        if self._bucket is not None:
            for _ in range(report.unused - client.unused):
                self._bucket.put_back()
        client.returned, client.unused = report.returned, report.unused
        wanted = max(
            0, report.granted + report.waiting - client.granted
        )  # minus grants that the client does not know of yet
        while len(client.places) > wanted:
            del self._queue[client.places.pop()]
        while len(client.places) < wanted:
            client.places.append(next(self._places))
            self._queue[client.places[-1]] = client

    def _grant(self, now: float) -> None:
        """Grants free permits to the queue, and updates `crowded` of each client."""
        while self._queue and now >= self._opens_at and self._free() > 0:
            if self._bucket is not None and not self._bucket.take(now):
                break
            _, client = self._queue.popitem(last=False)
            client.places.popleft()
            client.granted += 1
            client.version += 1
            self._held += 1
        for client in self._clients.values():
            crowded = len(self._queue) > len(client.places)
            if crowded != client.crowded:
                client.crowded = crowded
                client.version += 1

    def _forget(self, client: _Client) -> None:
        del self._clients[client.name]
        self._held -= client.granted - client.returned
        for place in client.places:
            del self._queue[place]

    def _free(self) -> int:
        """Returns the number of permits that are not leased; unlimited if only the rate is limited."""
        return sys.maxsize if self._limit.max_concurrent is None else self._limit.max_concurrent - self._held


class LeaseClient(WaitQueue[T]):
    """Grants the permits leased by one process to its waiters. `new_name` returns a unique client name."""

    def __init__(self, limit: Limit, lease_seconds: float, new_name: Callable[[], str]) -> None:
        super().__init__()
        self._limit = limit
        self._lease_seconds = lease_seconds
        self._new_name = new_name
        self._begin()

    def _begin(self) -> None:
        """Starts over under a new name, with all totals at zero; permits in use no longer count."""
        self.name = self._new_name()
        self.known = False
        self._number = self._version = self._granted = self._returned = self._unused = 0
        self._held = set()
        self.idle = 0
        """The number of permits kept for the next waiter."""
        self._used_at = self._valid_until = float("-inf")
        self._crowded = False
        self.has_changes = bool(self._waiting)
        """Whether there is a change to report to the server at once."""

    @property
    def is_quiet(self) -> bool:
        """Whether no permit is held, kept or waited for, and there is nothing to report."""
        return not (self._held or self.idle or self._waiting or self.has_changes)

    def enter(self, ticket: T, now: float) -> list[tuple[T, int]]:
        granted = super().enter(ticket, now)
        self.has_changes |= not granted
        return granted

    def cancel(self, ticket: T, now: float) -> list[tuple[T, int]]:
        self.has_changes |= ticket in self._waiting
        return super().cancel(ticket, now)

    def release(self, lease: int, now: float, unused: bool = False) -> list[tuple[T, int]]:
        if self._limit.max_concurrent is None:
            if unused:
                self._unused += 1
                self.has_changes = True
        elif lease in self._held:
            self._held.discard(lease)
            if self._returns_at_once:
                self._give_back(1, unused)
            else:
                self.idle += 1
                self._used_at = now
        granted = self.advance(now)
        self.has_changes |= bool(granted)  # one place in the server's queue is no longer needed
        return granted

    def advance(self, now: float) -> list[tuple[T, int]]:
        """Grants kept permits to waiters, and returns permits to the server that must not, or need not, be kept."""
        granted = super().advance(now)
        if not self._waiting and self.idle and (self._returns_at_once or now >= self._used_at + IDLE_SECONDS):
            self._give_back(self.idle, unused=True)
            self.idle = 0
        return granted

    def next_event(self) -> float | None:
        return self._used_at + IDLE_SECONDS if self.idle else None

    def report(self, now: float, leaves: bool = False) -> Report:
        """Builds the next report to the server."""
        self._number += 1
        self.has_changes = False
        return Report(
            client=self.name,
            number=self._number,
            version=self._version,
            granted=self._granted,
            returned=self._returned,
            unused=self._unused,
            waiting=max(0, len(self._waiting) - self.idle),
            is_valid=now < self._valid_until,
            leaves=leaves,
        )

    def receive(self, reply: Reply, sent_at: float, now: float) -> list[tuple[T, int]]:
        """Applies the reply to the report sent at `sent_at`; returns the grants that it made possible."""
        if reply.client != self.name:
            return []
        if not reply.known:
            self._begin()
            return []
        self.known = True
        self._valid_until = max(self._valid_until, sent_at + self._lease_seconds)
        if reply.version > self._version:  # otherwise a newer reply overtook it
            self._version, self._crowded = reply.version, reply.crowded
            self.idle += reply.granted - self._granted
            self._granted = reply.granted
            self._used_at = now
        return self.advance(now)

    def leave(self, now: float) -> Report:
        """Builds the last report under this name, which ends all leases at once. The client remains usable."""
        report = self.report(now, leaves=True)
        self._begin()
        return report

    def fail(self) -> list[T]:
        """Removes and returns all waiters."""
        tickets = list(self._waiting)
        self._waiting.clear()
        self.has_changes = bool(tickets)
        return tickets

    @property
    def _returns_at_once(self) -> bool:
        return self._crowded or self._limit.per_second is not None

    def _grant(self, now: float) -> int | None:
        if not self.idle or now >= self._valid_until:
            return None
        self.idle -= 1
        self._used_at = now
        self._leases += 1
        if self._limit.max_concurrent is None:
            self._returned += 1  # a pure rate limit holds no permits
        else:
            self._held.add(self._leases)
        return self._leases

    def _give_back(self, count: int, unused: bool) -> None:
        self._returned += count
        self._unused += count if unused else 0
        self.has_changes = True
