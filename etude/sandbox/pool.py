"""Boxes kept ready: forked and set up in advance, each used once.

Invariant: a box is handed out at most once, and a dead fork server is replaced by the next request instead of failing any of
them. The pool does not know what runs in a box.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from etude.errors import one_line
from etude.sandbox.cgroup import Delegation
from etude.sandbox.fork_server import ForkServer, ForkServerGone
from etude.sandbox.guest.settings import Settings
from etude.sandbox.guests import BoxGone, Guest
from etude.sandbox.types import Isolation, SandboxError


class Pool:
    """Bound to one event loop; keeps `spare` boxes waiting."""

    def __init__(
        self,
        isolation: Isolation,
        settings: Settings,
        libraries: tuple[str, ...],
        spare: int,
        delegation: Delegation | None,
    ) -> None:
        self._isolation = isolation
        self._settings = settings
        self._libraries = libraries
        self._spare = spare
        self._delegation = delegation
        self._fork_server: ForkServer | None = None
        self._starting = asyncio.Lock()
        self._ready: deque[Guest] = deque()
        self._refill: asyncio.Task[None] | None = None
        self._closed = False

    async def take(self, fresh: bool = False) -> Guest:
        """A box that waits for its request; it belongs to the caller.

        `fresh`: forks a new one and discards those waiting: the caller got a dead one, and its killer may not have
        reached the others yet.

        Raises:
            BoxGone: the box died at once.
            SandboxError: no fork server starts or forks here (any more).
        """
        if self._closed:
            raise SandboxError("the sandbox is closed")
        guest = None
        while self._ready and guest is None:
            candidate = self._ready.popleft()
            if candidate.alive and not fresh:
                guest = candidate
            else:
                candidate.discard()
        if guest is None:
            guest = await self._fork()
        if self._refill is None or self._refill.done():
            self._refill = asyncio.ensure_future(self._fill())
        return guest

    async def _fork(self) -> Guest:
        try:
            guest = await (await self._running()).fork()
        except ForkServerGone:
            guest = await (await self._running()).fork()
        if self._delegation is not None:
            try:
                await guest.admit(self._delegation.group())
            except BaseException as error:
                await guest.close()
                if isinstance(error, OSError):
                    raise BoxGone(f"the box was gone before it had a control group: {one_line(error)}") from error
                raise
        return guest

    async def _running(self) -> ForkServer:
        async with self._starting:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if self._fork_server is None or not self._fork_server.alive:
                if self._fork_server is not None:
                    gone, self._fork_server = self._fork_server, None
                    await gone.close()
                self._fork_server = await ForkServer.start(self._isolation, self._settings, self._libraries)
            return self._fork_server

    async def _fill(self) -> None:
        with contextlib.suppress(SandboxError):  # raised to the next caller that needs a box
            while len(self._ready) < self._spare and not self._closed:
                self._ready.append(await self._fork())

    async def close(self) -> None:
        """Kills the waiting boxes and the fork server."""
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refill
        while self._ready:
            await self._ready.popleft().close()
        if self._fork_server is not None:
            await self._fork_server.close()
