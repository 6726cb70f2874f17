"""`Link`: carries what a `Holder` has to say to the keeper of its limit, and what the keeper answers back.

Invariant: one turn is under way at a time and is said again until it is answered, so that turns arrive in order and
count once; meanwhile an open `listen` brings the keeper's news, unless the holder has nothing and waits for nothing.
All links of a process share one thread. While the keeper cannot be reached, waiters wait for `patience` seconds and
then fail with `InfrastructureError`; the link goes on trying, and what was held runs out by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from etude.bounded import background_loop
from etude.errors import InfrastructureError, one_line
from etude.limits.holder import IDLE_SECONDS, Holder
from etude.limits.limiter import Granted, Ticket
from etude.limits.messages import Reply, Turn

_log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between attempts to reach the keeper


class Transport(Protocol):
    """A way to one keeper. Whatever it raises means that the keeper was not reached."""

    async def turn(self, turn: Turn) -> Reply:
        """Says a turn."""
        ...

    async def listen(self, owner: str, heard: int, seconds: float) -> Reply:
        """Waits for news."""
        ...

    async def reconnect(self) -> None:
        """Called after a failure."""
        ...


class Link:
    """Runs until `close`. `lock` guards the holder; `deliver` hands out what was granted, and is called under it."""

    def __init__(
        self,
        holder: Holder[Ticket],
        lock: threading.Lock,
        deliver: Callable[[Granted], None],
        transport: Transport,
        lease_seconds: float,
        patience: float,
    ) -> None:
        self._holder = holder
        self._lock = lock
        self._deliver = deliver
        self._transport = transport
        self._lease_seconds = lease_seconds
        self._patience = patience
        self._loop = background_loop("etude-limits")
        self._posted = False
        self._closed = False
        self._lost_at: float | None = None
        self._pause = FIRST_PAUSE
        self._mail = asyncio.Event()
        self._introduced = asyncio.Event()
        self._done = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def post(self) -> None:
        """There is something to say; called under the lock, from any thread. After `close` all waiters fail."""
        if self._closed:
            self._fail("it was closed")
        elif not self._posted:
            self._posted = True
            self._loop.call_soon_threadsafe(self._mail.set)

    def close(self, seconds: float = 2.0) -> None:
        """Returns what is held, as far as the keeper can be reached within `seconds`, and fails all waiters."""
        if self._closed:
            return
        self._closed = True
        self._done.cancel()
        with self._lock:
            farewell = self._holder.farewell()
        goodbye = asyncio.run_coroutine_threadsafe(self._transport.turn(farewell), self._loop)
        with contextlib.suppress(Exception):
            goodbye.result(seconds)
        goodbye.cancel()
        self._fail_waiters("it was closed")

    async def _run(self) -> None:
        try:
            await asyncio.gather(self._speak(), self._hear(), self._tidy())
        except Exception as error:  # nobody waits for this task: its end must not be silent
            _log.exception("a limiter's link broke")
            self._closed = True
            self._fail_waiters(f"{type(error).__name__}: {one_line(error)}")

    async def _speak(self) -> None:
        while True:
            await self._mail.wait()
            self._mail.clear()
            while True:
                with self._lock:
                    self._posted = False
                    turn = self._holder.next_turn()
                if turn is None:
                    break
                await self._exchange(turn, self._transport.turn(turn), self._lease_seconds)

    async def _hear(self) -> None:
        while True:
            await self._introduced.wait()
            with self._lock:
                farewell = self._holder.farewell() if self._holder.is_quiet else None
                name, heard = self._holder.name, self._holder.heard
            if farewell is not None:  # an open call would keep an idle Ray worker from ending
                self._introduced.clear()
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(self._transport.turn(farewell), self._lease_seconds)
                continue
            seconds = self._lease_seconds / 3
            await self._exchange(None, self._transport.listen(name, heard, seconds), seconds + self._lease_seconds)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(IDLE_SECONDS / 2)
            with self._lock:
                self._deliver(self._holder.advance(time.monotonic()))

    async def _exchange(self, turn: Turn | None, answer: Coroutine[Any, Any, Reply], limit: float) -> None:
        """Takes in one answer, or pauses after a failure."""
        sent_at = time.monotonic()
        try:
            reply = await asyncio.wait_for(answer, limit)
        except Exception as error:  # whatever it is, the keeper was not reached
            await self._recover(error)
            return
        self._lost_at = None
        with self._lock:
            self._deliver(self._holder.hear(reply, turn, sent_at, time.monotonic()))
            introduced = self._holder.introduced
        if introduced:
            self._introduced.set()
        else:
            self._introduced.clear()

    async def _recover(self, error: Exception) -> None:
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
            self._pause = FIRST_PAUSE
            _log.warning("a limiter's keeper cannot be reached: %s: %s", type(error).__name__, one_line(error))
        if now - self._lost_at >= self._patience:
            self._fail_waiters(f"it could not be reached for {self._patience:g} s: {one_line(error)}")
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        try:
            await asyncio.wait_for(self._transport.reconnect(), self._lease_seconds)
        except Exception as again:  # the next attempt will tell
            _log.debug("no new way to the limiter's keeper: %s", one_line(again))

    def _fail_waiters(self, reason: str) -> None:
        with self._lock:
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        for ticket in self._holder.fail():
            ticket.error = InfrastructureError(f"the limiter is gone: {reason}")
            ticket.wake()
