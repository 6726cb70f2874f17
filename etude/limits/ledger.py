"""`Ledger`: who holds which permits of a limit, and who is next; the keeper's side, as a pure state machine.

Invariants
- Never more than `max_concurrent` leases are in force, and never more than the rate allows are granted.
- A request is granted when all earlier ones are granted or cancelled: first come, first served, whoever asks.
- A lease is in force until its owner returns it, leaves, or is not heard of for `lease_seconds`. Only its owner can
  return it.
- Leases beyond those asked for (batches) are granted only while nobody waits.

The ledger is told the time and never waits; carrying messages is the business of `cluster`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from etude.limits.bucket import TokenBucket
from etude.limits.limit import Limit
from etude.limits.messages import Crowded, Event, Grant, LeaseId, Refused, Reply, Turn

MAX_BATCH = 32


@dataclass
class _Owner:
    name: str
    seen: float
    turn: int = 0
    leases: set[LeaseId] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)
    said: int = 0
    crowded: bool = False


class Ledger:
    """`keeper` is an id never used before. A ledger that takes over from one that was lost is told to be `settling`:
    for one `lease_seconds` it grants nothing and accepts the leases that their holders say they have."""

    def __init__(self, limit: Limit, lease_seconds: float, keeper: str, now: float, settling: bool = False) -> None:
        self.limit = limit
        self.lease_seconds = lease_seconds
        self.keeper = keeper
        self.fresh: set[str] = set()
        """Owners that have events they were not sent yet; emptied by whoever sends them."""
        self._opens_at = now + lease_seconds if settling else now
        self._bucket = TokenBucket(limit.per_second, limit.bucket_size, now) if limit.per_second else None
        self._owners: OrderedDict[str, _Owner] = OrderedDict()  # the one not heard of for longest first
        self._queue: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._waiting: dict[str, int] = {}  # owner → how many requests of it are in the queue
        self._crowd: str | bool = False
        self._held = 0
        self._leases = 0

    @property
    def held(self) -> int:
        """How many leases are in force."""
        return self._held

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def owners(self) -> int:
        """How many holders are known."""
        return len(self._owners)

    def turn(self, turn: Turn, now: float) -> Reply:
        """Does what a holder says, once, and answers with what it has not heard."""
        self.advance(now)
        owner = self._owners.get(turn.owner)
        if owner is None:
            if turn.number != 1 or turn.heard != 0:
                return Reply(self.keeper, turn.owner, known=False)
            owner = self._owners[turn.owner] = _Owner(turn.owner, now)
        self._renew(owner, turn.heard, now)
        if turn.number > owner.turn:
            owner.turn = turn.number
            self._obey(owner, turn, now)
        return self._reply(owner)

    def listen(self, name: str, heard: int, now: float) -> Reply:
        """Renews the leases of an owner, and answers with what it has not heard."""
        self.advance(now)
        owner = self._owners.get(name)
        if owner is None:
            return Reply(self.keeper, name, known=False)
        self._renew(owner, heard, now)
        return self._reply(owner)

    def unheard(self, name: str) -> Reply:
        """What an owner has not heard, without a renewal: it is not known whether the owner still lives."""
        owner = self._owners.get(name)
        return Reply(self.keeper, name, known=False) if owner is None else self._reply(owner)

    def advance(self, now: float) -> None:
        """Ends what has expired and grants what is possible."""
        while self._owners:
            owner = next(iter(self._owners.values()))
            if now < owner.seen + self.lease_seconds:
                break
            self._forget(owner)
        self._grant(now)
        self._tell_crowds()

    def next_event(self) -> float | None:
        """When `advance` has something to do although nobody spoke."""
        due = [owner.seen + self.lease_seconds for owner in list(self._owners.values())[:1]]
        if self._queue and not self._full():
            due.append(max(self._opens_at, self._bucket.ready_at() if self._bucket else 0.0))
        return min(due, default=None)

    def _renew(self, owner: _Owner, heard: int, now: float) -> None:
        owner.seen = max(owner.seen, now)
        self._owners.move_to_end(owner.name)
        owner.events = [event for event in owner.events if event.number > heard]

    def _reply(self, owner: _Owner) -> Reply:
        self.fresh.discard(owner.name)
        return Reply(self.keeper, owner.name, known=True, events=tuple(owner.events))

    def _obey(self, owner: _Owner, turn: Turn, now: float) -> None:
        if turn.leaves:
            self._forget(owner)
        else:
            for lease in turn.adopt:
                self._adopt(owner, lease, now)
            for lease, unused in turn.releases:
                self._take_back(owner, lease, unused)
            for request in turn.cancels:
                self._drop(owner.name, request)
            for request in turn.requests:
                self._queue[owner.name, request] = None
                self._waiting[owner.name] = self._waiting.get(owner.name, 0) + 1
        asked = bool(turn.requests)
        self._grant(now)
        if asked and not self._queue and self._bucket is None and owner.name in self._owners:
            for _ in range(min(MAX_BATCH, self._free() // 2)):
                self._lease(owner, None)
        self._tell_crowds()

    def _adopt(self, owner: _Owner, lease: LeaseId, now: float) -> None:
        if now < self._opens_at and not self._full():
            owner.leases.add(lease)
            self._held += 1
        else:
            self._say(owner, Refused(owner.said + 1, lease))

    def _take_back(self, owner: _Owner, lease: LeaseId, unused: bool) -> None:
        if unused and self._bucket is not None:
            self._bucket.put_back()
        if lease in owner.leases:
            owner.leases.discard(lease)
            self._held -= 1

    def _drop(self, name: str, request: int) -> None:
        if (name, request) in self._queue:
            del self._queue[name, request]
            self._served(name)

    def _served(self, name: str) -> None:
        self._waiting[name] -= 1
        if not self._waiting[name]:
            del self._waiting[name]

    def _forget(self, owner: _Owner) -> None:
        del self._owners[owner.name]
        self._held -= len(owner.leases)
        self.fresh.add(owner.name)  # whoever listens in its name shall hear that it is unknown
        if self._waiting.pop(owner.name, None):
            for key in [key for key in self._queue if key[0] == owner.name]:
                del self._queue[key]

    def _grant(self, now: float) -> None:
        while self._queue and now >= self._opens_at and not self._full():
            if self._bucket is not None and not self._bucket.take(now):
                return
            (name, request), _ = self._queue.popitem(last=False)
            self._served(name)
            self._lease(self._owners[name], request)

    def _lease(self, owner: _Owner, request: int | None) -> None:
        self._leases += 1
        lease = f"{self.keeper}-{self._leases}"
        if self.limit.max_concurrent is not None:
            owner.leases.add(lease)
            self._held += 1
        self._say(owner, Grant(owner.said + 1, request, lease))

    def _say(self, owner: _Owner, event: Event) -> None:
        owner.said = event.number
        owner.events.append(event)
        self.fresh.add(owner.name)

    def _tell_crowds(self) -> None:
        """Tells each owner, when it changes, whether others wait."""
        crowd: str | bool = next(iter(self._waiting)) if len(self._waiting) == 1 else bool(self._waiting)
        if crowd != self._crowd:
            self._crowd = crowd
            for owner in self._owners.values():
                self._tell(owner)
        elif self._owners:
            self._tell(next(reversed(self._owners.values())))  # the one that spoke, perhaps for the first time

    def _tell(self, owner: _Owner) -> None:
        crowded = bool(self._crowd) and self._crowd != owner.name
        if crowded != owner.crowded:
            owner.crowded = crowded
            self._say(owner, Crowded(owner.said + 1, crowded))

    def _full(self) -> bool:
        return self.limit.max_concurrent is not None and self._held >= self.limit.max_concurrent

    def _free(self) -> int:
        return 0 if self.limit.max_concurrent is None else self.limit.max_concurrent - self._held
