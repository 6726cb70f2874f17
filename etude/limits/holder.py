"""`Holder`: the permits that one process holds of a cluster-wide limit, and its waiters; a pure state machine.

Invariants
- A waiter is granted a lease only while that lease is surely in force: the holder counts `lease_seconds` from the moment
  it *sent* the last message that was answered, the keeper from the moment it heard it.
- While other processes wait (the keeper says so), a lease that is free returns to the keeper at once; otherwise it is
  kept for the next waiter of this process, for `IDLE_SECONDS` at most. Under a rate limit nothing is kept.
- Waiters of the process are served in the order in which they asked.

It is the `Core` of a `Limiter`; carrying its turns to the keeper is the business of `cluster`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from etude.limits.limit import Limit
from etude.limits.messages import Crowded, Grant, LeaseId, Refused, Reply, Turn

T = TypeVar("T", bound=Hashable)

IDLE_SECONDS = 1.0


class Holder(Generic[T]):
    """Grants leases to tickets. `new_name` makes names for this holder that were never used before."""

    def __init__(self, limit: Limit, lease_seconds: float, new_name: Callable[[], str]) -> None:
        self._limit = limit
        self._lease_seconds = lease_seconds
        self._new_name = new_name
        self._waiters: OrderedDict[int, T] = OrderedDict()
        self._requests: dict[T, int] = {}
        self._asked = 0
        self._busy: set[LeaseId] = set()
        self._idle: deque[tuple[LeaseId, float]] = deque()  # the longest idle first
        self._keeper: str | None = None
        self._valid_until = float("-inf")
        self._begin(())

    def _begin(self, adopt: tuple[LeaseId, ...]) -> None:
        """Takes a new name, under which nothing was said or heard yet; all waiters ask again."""
        self.name = self._new_name()
        self.heard = 0
        self.introduced = False
        self._turns = 0
        self._said: Turn | None = None
        self._crowded = False
        if not adopt:
            self._valid_until = float("-inf")
        self._to_request: OrderedDict[int, None] = OrderedDict.fromkeys(self._waiters)
        self._to_cancel: list[int] = []
        self._to_release: list[tuple[LeaseId, bool]] = []
        self._to_adopt = adopt

    @property
    def head(self) -> T | None:
        """The ticket that is served next."""
        return next(iter(self._waiters.values()), None)

    @property
    def held(self) -> int:
        """How many permits are in use in this process."""
        return len(self._busy)

    @property
    def idle(self) -> int:
        """How many permits are kept for the next waiter."""
        return len(self._idle)

    @property
    def waiting(self) -> int:
        """How many tickets wait."""
        return len(self._waiters)

    @property
    def tickets(self) -> list[T]:
        """Those that wait, in order."""
        return list(self._waiters.values())

    def take(self, now: float) -> LeaseId | None:
        """A lease that is kept, or None: there is none, or somebody waits."""
        if self._waiters or not self._idle or now >= self._valid_until:
            return None
        lease, _ = self._idle.pop()
        self._busy.add(lease)
        return lease

    def enter(self, ticket: T, now: float) -> list[tuple[T, LeaseId]]:
        """Puts `ticket` at the end of the queue."""
        lease = self.take(now)
        if lease is not None:
            return [(ticket, lease)]
        self._asked += 1
        self._waiters[self._asked] = ticket
        self._requests[ticket] = self._asked
        self._to_request[self._asked] = None
        return []

    def cancel(self, ticket: T, now: float) -> list[tuple[T, LeaseId]]:
        """Forgets a waiting ticket; one that does not wait is left alone."""
        if ticket in self._requests:
            self._leave(self._requests[ticket])
        return []

    def release(self, lease: LeaseId, now: float, unused: bool = False) -> list[tuple[T, LeaseId]]:
        """Takes a lease back; one that is not in force (any more) is ignored."""
        if self._limit.max_concurrent is None:
            if unused:
                self._to_release.append((lease, True))
            return []
        if lease not in self._busy:
            return []
        self._busy.discard(lease)
        return self._place(lease, now, unused)

    def advance(self, now: float) -> list[tuple[T, LeaseId]]:
        """Returns leases to the keeper that were idle for long."""
        while self._idle and now >= self._idle[0][1] + IDLE_SECONDS:
            self._to_release.append((self._idle.popleft()[0], True))
        return []

    def next_event(self) -> float | None:
        """None: a waiter is served by messages, never by time alone."""
        return None

    def idle_until(self) -> float | None:
        """When `advance` has a lease to return."""
        return self._idle[0][1] + IDLE_SECONDS if self._idle else None

    @property
    def has_mail(self) -> bool:
        """Whether there is something new to say."""
        return bool(self._to_request or self._to_cancel or self._to_release or self._to_adopt)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is held, waited for or left to say."""
        return not (self._busy or self._idle or self._waiters or self._said or self.has_mail)

    def next_turn(self) -> Turn | None:
        """What there is to say: the last turn again while it was not answered, None if there is nothing."""
        if self._said is None and self.has_mail:
            self._turns += 1
            self._said = Turn(
                owner=self.name,
                number=self._turns,
                heard=self.heard,
                requests=tuple(self._to_request),
                cancels=tuple(self._to_cancel),
                releases=tuple(self._to_release),
                adopt=self._to_adopt,
            )
            self._to_request, self._to_cancel, self._to_release, self._to_adopt = OrderedDict(), [], [], ()
        return self._said

    def hear(self, reply: Reply, turn: Turn | None, sent_at: float, now: float) -> list[tuple[T, LeaseId]]:
        """Takes in the answer to `turn`, or to a `listen` (None), that was sent at `sent_at`."""
        if reply.owner != self.name:
            return []
        if not reply.known:
            self._begin_again(reply.keeper, now)
            return []
        self._keeper = reply.keeper
        self._valid_until = max(self._valid_until, sent_at + self._lease_seconds)
        if turn is not None and turn is self._said:
            self._said = None
            self.introduced = True
        granted: list[tuple[T, LeaseId]] = []
        for event in reply.events:
            if event.number != self.heard + 1:
                continue
            self.heard += 1
            if isinstance(event, Grant):
                granted += self._granted(event, now)
            elif isinstance(event, Crowded):
                self._crowded = event.crowded
                if self._crowded:
                    self._to_release += [(lease, True) for lease, _ in self._idle]
                    self._idle.clear()
            elif isinstance(event, Refused):
                self._busy.discard(event.lease)
                self._idle = deque(entry for entry in self._idle if entry[0] != event.lease)
        while self._waiters and self._idle and now < self._valid_until:
            granted += self._hand(self._idle.pop()[0])
        return granted

    def farewell(self) -> Turn:
        """The turn with which this name ends: everything returns at once. The holder may be used on."""
        turn = Turn(owner=self.name, number=self._turns + 1, heard=self.heard, leaves=True)
        self._busy.clear()
        self._idle.clear()
        self._begin(())
        return turn

    def fail(self) -> list[T]:
        """Forgets all waiters, and says which they were."""
        tickets = self.tickets
        for ticket in tickets:
            self._leave(self._requests[ticket])
        return tickets

    def _begin_again(self, keeper: str, now: float) -> None:
        """Our leases have expired; unless it is the keeper that forgot, in which case it may take them over."""
        in_force = self._keeper not in (None, keeper) and now < self._valid_until
        adopt = (*self._busy, *(lease for lease, _ in self._idle)) if in_force else ()
        if not in_force:
            self._busy.clear()
            self._idle.clear()
        self._keeper = keeper
        self._begin(adopt)

    def _granted(self, grant: Grant, now: float) -> list[tuple[T, LeaseId]]:
        ticket = None if grant.request is None else self._waiters.get(grant.request)
        if ticket is None or grant.request is None:
            return self._place(grant.lease, now, unused=True)
        if self._limit.max_concurrent is not None and now >= self._valid_until:  # this process was stopped meanwhile
            self._to_release.append((grant.lease, True))
            self._to_request[grant.request] = None
            self._to_request.move_to_end(grant.request, last=False)
            return []
        del self._waiters[grant.request], self._requests[ticket]
        self._occupy(grant.lease)
        return [(ticket, grant.lease)]

    def _place(self, lease: LeaseId, now: float, unused: bool) -> list[tuple[T, LeaseId]]:
        """What becomes of a free lease: it returns, serves the next waiter, or is kept."""
        if self._crowded or self._limit.per_second is not None or now >= self._valid_until:
            self._to_release.append((lease, unused))
            return []
        if self._waiters:
            return self._hand(lease)
        self._idle.append((lease, now))
        return []

    def _hand(self, lease: LeaseId) -> list[tuple[T, LeaseId]]:
        request, ticket = next(iter(self._waiters.items()))
        self._leave(request)
        self._occupy(lease)
        return [(ticket, lease)]

    def _leave(self, request: int) -> None:
        """Takes a waiter out of the queue here, and out of the keeper's if it is there."""
        del self._requests[self._waiters.pop(request)]
        if request in self._to_request:
            del self._to_request[request]
        else:
            self._to_cancel.append(request)

    def _occupy(self, lease: LeaseId) -> None:
        if self._limit.max_concurrent is not None:
            self._busy.add(lease)
