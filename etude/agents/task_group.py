"""`TaskGroup`: tasks that may start further ones, and that succeed or fail together.

Invariant: `finish` returns once every task has succeeded; on the first exception, or when its caller is cancelled, all
others are cancelled, get time to clean up, and nothing is left running unobserved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from etude.bounded import settle


class TaskGroup:
    """Created and used inside one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task; a finished group starts no more."""
        if self._over.done():
            work.close()
            return
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def finish(self, grace: float) -> None:
        """Waits for all tasks; cancelled ones have `grace` seconds to clean up.

        Raises:
            Exception: the first that a task raised.
        """
        try:
            if self._tasks:
                await self._over
        finally:
            self._over.cancel()
            await settle(self._tasks, grace)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if self._over.done():
            return
        if error is not None:
            self._over.set_exception(error)
        elif task.cancelled():
            self._over.cancel()
        elif not self._tasks:
            self._over.set_result(None)
