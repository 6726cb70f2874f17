"""`Keeper`: a `Ledger` that answers messages and lets holders wait for news; the body of the cluster's limiter actor.

Invariant: an answer leaves when there is something to say, not on a beat, so that a permit that returns reaches the next
waiter in the time of one message. Only a message that arrives renews leases: an answer that was waiting does not.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass

from etude.limits.ledger import Ledger
from etude.limits.limit import Limit
from etude.limits.messages import Reply, Turn


@dataclass(frozen=True)
class KeeperInfo:
    """What a limiter is, and how it stands."""

    limit: Limit
    lease_seconds: float
    held: int
    waiting: int
    owners: int


class Keeper:
    """Must be used in one event loop."""

    def __init__(self, limit: Limit, lease_seconds: float, settling: bool = False) -> None:
        self._ledger = Ledger(limit, lease_seconds, uuid.uuid4().hex, time.monotonic(), settling)
        self._listeners: dict[str, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def info(self) -> KeeperInfo:
        """The limit that is kept, and what is out at this moment."""
        ledger = self._ledger
        ledger.advance(time.monotonic())
        self._after()
        return KeeperInfo(ledger.limit, ledger.lease_seconds, ledger.held, ledger.waiting, ledger.owners)

    async def turn(self, turn: Turn) -> Reply:
        """Does what a holder says."""
        reply = self._ledger.turn(turn, time.monotonic())
        self._after()
        return reply

    async def listen(self, owner: str, heard: int, seconds: float) -> Reply:
        """Answers as soon as there is an event after `heard`, after `seconds` at the latest."""
        reply = self._ledger.listen(owner, heard, time.monotonic())
        self._after()
        if reply.events or not reply.known:
            return reply
        self._wake(owner)
        listener = self._listeners[owner] = asyncio.get_running_loop().create_future()
        await asyncio.wait({listener}, timeout=seconds)
        if self._listeners.get(owner) is listener:
            del self._listeners[owner]
        return self._ledger.unheard(owner)

    def _wake(self, owner: str) -> None:
        listener = self._listeners.pop(owner, None)
        if listener is not None and not listener.done():
            listener.set_result(None)

    def _after(self) -> None:
        """Sends news to those that listen, and comes back when the ledger has something to do."""
        for owner in list(self._ledger.fresh):
            self._wake(owner)
        self._ledger.fresh.clear()
        if self._timer is not None:
            self._timer.cancel()
        due = self._ledger.next_event()
        if due is not None:
            delay = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._advance)

    def _advance(self) -> None:
        self._timer = None
        self._ledger.advance(time.monotonic())
        self._after()
