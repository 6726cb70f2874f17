"""`LeaseServer`: tracks the holders and the queue of a cluster-wide limit's permits; `LeaseActor`: the same as an actor.

The protocol is one call. A client reports its *state* (running totals, never events), and the reply is the server's, so
that lost, repeated or reordered messages do no harm: the next one has it all.

Invariants
- Never more than `max_concurrent` permits are leased, and never more than the rate allows are granted.
- Places in the queue are served first come, first served. They belong to the client: when one of its waiters leaves,
  it loses its youngest place.
- A client's leases end when it returns them, leaves, or is silent for `lease_seconds`; nothing else can end them.
- A client is granted more than it asked for (a batch) only while no other client waits.

Callers pass `LeaseServer` the time; it never waits.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from etude.limits.limit import Limit, TokenBucket

MAX_BATCH = 32


@dataclass(frozen=True)
class Report:
    """A client's state. Any report renews all leases of the client; one with a lower `number` does nothing else."""

    client: str
    number: int
    """From 1, counted up with each report."""
    version: int
    """Of the last reply that the client applied."""
    granted: int
    """Permits granted to it so far, as far as it knows."""
    returned: int
    """Of those, how many it gave back."""
    unused: int
    """Of those, how many were unused: they do not count against the rate."""
    waiting: int
    """How many more it wants."""
    in_force: bool
    """Whether its leases have surely not expired: a server that lost its state takes them over."""
    leaves: bool = False
    """The last report: all that the client holds returns now."""


@dataclass(frozen=True)
class Reply:
    """The server's state, for one client."""

    client: str
    known: bool
    """False: its leases have expired. It must start over under a new name."""
    version: int = 0
    """Grows whenever `granted` or `crowded` changes."""
    granted: int = 0
    """Permits granted to the client so far."""
    crowded: bool = False
    """Whether other clients wait: while they do, permits return to the server as soon as they are free."""


@dataclass(frozen=True)
class LimiterInfo:
    """A cluster-wide limiter's limit and state."""

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
    """A server that replaces a lost one is `settling`: for one `lease_seconds` it grants nothing and takes over the
    leases that clients report."""

    def __init__(self, limit: Limit, lease_seconds: float, now: float, settling: bool = False) -> None:
        self._limit = limit
        self._lease_seconds = lease_seconds
        self._opens_at = now + lease_seconds if settling else now
        self._bucket = TokenBucket(limit.per_second, limit.bucket_size, now) if limit.per_second else None
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # the longest silent first
        self._queue: OrderedDict[int, _Client] = OrderedDict()  # by place
        self._places = itertools.count()
        self._held = 0

    def info(self) -> LimiterInfo:
        """The limiter's state."""
        return LimiterInfo(self._limit, self._lease_seconds, self._held, len(self._queue), len(self._clients))

    def hear(self, report: Report, now: float) -> Reply:
        """Applies a report and returns the reply."""
        self.advance(now)
        client = self._admit(report, now)
        if client is not None and report.leaves:
            self._forget(client)
        elif client is not None:
            client.seen = now
            self._clients.move_to_end(client.name)
            if report.number > client.number:
                client.number = report.number
                self._update(client, report, now)
        self._grant(now)
        self._mark_crowded()
        return self.reply(report.client)

    def reply(self, name: str) -> Reply:
        """The current reply to the client `name`."""
        client = self._clients.get(name)
        if client is None:
            return Reply(name, known=False)
        return Reply(name, True, client.version, client.granted, client.crowded)

    def advance(self, now: float) -> None:
        """Ends expired leases and grants what is possible."""
        while self._clients and now >= (client := next(iter(self._clients.values()))).seen + self._lease_seconds:
            self._forget(client)
        self._grant(now)
        self._mark_crowded()

    def next_event(self) -> float | None:
        """When `advance` next has something to do without a report."""
        due = [client.seen + self._lease_seconds for client in list(self._clients.values())[:1]]
        if self._queue and self._free() > 0:
            due.append(max(self._opens_at, self._bucket.ready_at() if self._bucket else 0.0))
        return min(due, default=None)

    def _admit(self, report: Report, now: float) -> _Client | None:
        """The client, new or known; None if it claims permits that it cannot have."""
        settling = now < self._opens_at
        client = self._clients.get(report.client)
        if client is None:
            if report.number > 1 and not settling:
                return None
            client = _Client(report.client, now, report.returned, report.returned, report.unused)
            self._clients[report.client] = client
        claimed = report.granted - client.granted
        if claimed > 0:  # granted by the server before this one
            if not (settling and report.in_force) or claimed > self._free():
                self._forget(client)
                return None
            client.granted += claimed
            self._held += claimed
        if report.version > client.version:
            client.version = report.version + 1
        return client

    def _update(self, client: _Client, report: Report, now: float) -> None:
        self._held -= report.returned - client.returned
        if self._bucket is not None:
            for _ in range(report.unused - client.unused):
                self._bucket.put_back()
        client.returned, client.unused = report.returned, report.unused
        wanted = max(0, report.granted + report.waiting - client.granted)  # less grants that have not reached it yet
        asks = wanted > len(client.places)
        while len(client.places) > wanted:
            del self._queue[client.places.pop()]
        while len(client.places) < wanted:
            client.places.append(next(self._places))
            self._queue[client.places[-1]] = client
        self._grant(now)
        if asks and not self._queue and self._bucket is None and self._free() > 1:
            self._lease(client, min(MAX_BATCH, self._free() // 2))

    def _grant(self, now: float) -> None:
        while self._queue and now >= self._opens_at and self._free() > 0:
            if self._bucket is not None and not self._bucket.take(now):
                return
            _, client = self._queue.popitem(last=False)
            client.places.popleft()
            self._lease(client, 1)

    def _lease(self, client: _Client, count: int) -> None:
        client.granted += count
        client.version += 1
        self._held += count

    def _forget(self, client: _Client) -> None:
        del self._clients[client.name]
        self._held -= client.granted - client.returned
        for place in client.places:
            del self._queue[place]

    def _mark_crowded(self) -> None:
        for client in self._clients.values():
            crowded = len(self._queue) > len(client.places)
            if crowded != client.crowded:
                client.crowded = crowded
                client.version += 1

    def _free(self) -> int:
        """The number of unleased permits; unlimited if only the rate is limited."""
        return sys.maxsize if self._limit.max_concurrent is None else self._limit.max_concurrent - self._held


class LeaseActor:
    """A `LeaseServer` in an event loop. A reply is sent when there is news, not periodically, so that a returned permit
    reaches the next waiter within one message; only an incoming report renews leases."""

    def __init__(self, limit: Limit, lease_seconds: float, settling: bool = False) -> None:
        self._server = LeaseServer(limit, lease_seconds, time.monotonic(), settling)
        self._polls: dict[str, tuple[int, asyncio.Future[None]]] = {}  # client → its known version
        self._timer: asyncio.TimerHandle | None = None

    async def info(self) -> LimiterInfo:
        """The limiter's current state."""
        self._advance()
        return self._server.info()

    async def sync(self, report: Report, seconds: float) -> Reply:
        """Applies a report; replies as soon as there is news for the client, after `seconds` at the latest."""
        reply = self._server.hear(report, time.monotonic())
        self._publish()
        if seconds and reply.known and reply.version == report.version:
            poll: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._polls[report.client] = report.version, poll
            await asyncio.wait({poll}, timeout=seconds)
            if self._polls.get(report.client) == (report.version, poll):
                del self._polls[report.client]
            reply = self._server.reply(report.client)
        return reply

    def _advance(self) -> None:
        self._server.advance(time.monotonic())
        self._publish()

    def _publish(self) -> None:
        """Answers the polls that have news, and schedules itself for the server's next event."""
        for name, (version, poll) in list(self._polls.items()):
            reply = self._server.reply(name)
            if not poll.done() and not (reply.known and reply.version == version):
                poll.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        due = self._server.next_event()
        if due is not None:
            delay = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._advance)
