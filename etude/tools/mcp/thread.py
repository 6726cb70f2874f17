"""`LoopThread`: the one event loop, in a thread of its own, that owns every MCP connection of the process.

Invariant: a connection lives in one loop however many loops use it, one after another or at once: rollouts, commands
and tests each run their own. Work is handed over with `call` (from a coroutine) or `run` (from plain code); cancelling
the caller cancels the work. A forked child gets a thread of its own and never touches its parent's.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")

_SHUTDOWN_SECONDS = 15.0  # for connections to close: a stubborn subprocess takes up to 6


class LoopThread:
    """A daemon thread that runs an event loop until the process exits."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="etude-mcp", daemon=True)
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._thread.start()
        atexit.register(self._shut_down, os.getpid())

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def at_exit(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Has `close` awaited in the loop when the process exits."""
        self._closers.append(close)

    def run(self, work: Coroutine[Any, Any, R], timeout: float) -> R:
        """The result of `work`, waited for by a thread that may run another event loop.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; it has been cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            raise TimeoutError(f"no answer within {timeout:g} s") from None
        finally:
            future.cancel()

    async def call(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of `work`, awaited from whatever event loop the caller runs in."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def _shut_down(self, pid: int) -> None:
        if pid != os.getpid() or not self._thread.is_alive():
            return
        with contextlib.suppress(Exception):  # the process ends; a subprocess that is left sees its stdin close
            self.run(self._close_all(), _SHUTDOWN_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(1.0)

    async def _close_all(self) -> None:
        await asyncio.gather(*(close() for close in self._closers), return_exceptions=True)


_lock = threading.Lock()
_shared: dict[int, LoopThread] = {}


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the parent's may have been held by a thread that the child does not have


os.register_at_fork(after_in_child=_after_fork)


def loop_thread() -> LoopThread:
    """This process's thread, started at the first use."""
    with _lock:
        pid = os.getpid()
        if pid not in _shared:
            _shared[pid] = LoopThread()
        return _shared[pid]
