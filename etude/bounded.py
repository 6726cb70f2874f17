"""Calls that cannot wait for ever: `within` limits a coroutine, `BlockingCalls` takes blocking functions off the loop.

Invariant: whatever a user's code does (hang, swallow its cancellation, exit the interpreter), the caller gets an answer
or an exception in bounded time, and a cancelled caller leaves no call behind that it did not try to stop. A thread
cannot be killed: a function that never returns keeps its thread, but neither its caller nor the process's exit.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from etude.errors import InfrastructureError

P = ParamSpec("P")
R = TypeVar("R")

GRACE_SECONDS = 5.0  # for a cancelled call to clean up after itself

_strays: set[asyncio.Task[Any]] = set()  # tasks that ignored their cancellation: kept from the garbage collector


async def called(function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Awaits `function(...)`, made safe to run as a task.

    Raises:
        TypeError: `function` is not asynchronous.
        RuntimeError: it raised `SystemExit`, which would end the event loop.
    """
    try:
        awaitable = function(*args, **kwargs)
        if not inspect.isawaitable(awaitable):
            raise TypeError(f"{getattr(function, '__qualname__', function)} must be defined with 'async def'")
        return await awaitable
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


async def settle(tasks: Iterable[asyncio.Task[Any]], grace: float | None = None) -> None:
    """Cancels those `tasks` that still run and waits up to `grace` seconds (default `GRACE_SECONDS`) for their end.

    A cancellation of the caller meanwhile is raised afterwards, so that it cannot cut a clean-up short.
    Their results and errors are left in them; one that is never read is not reported by the event loop.
    """
    tasks = set(tasks)
    for task in tasks:
        _strays.add(task)
        task.add_done_callback(_retrieve)
    pending = {task for task in tasks if not task.done()}
    for task in pending:
        task.cancel()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (GRACE_SECONDS if grace is None else grace)
    cancelled: asyncio.CancelledError | None = None
    while pending and (left := deadline - loop.time()) > 0:
        try:
            _, pending = await asyncio.wait(pending, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _retrieve(task: asyncio.Task[Any]) -> None:
    _strays.discard(task)
    if not task.cancelled():
        task.exception()


async def within(seconds: float, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `await function(...)`, which is cancelled for good after `seconds`, or when the caller is.

    Raises:
        TimeoutError: no result in time.
        InfrastructureError: the call ended as cancelled although nobody had cancelled it.
    """
    return await result_of(asyncio.ensure_future(called(function, *args, **kwargs)), seconds)


async def result_of(task: asyncio.Task[R], seconds: float, grace: float | None = None) -> R:
    """What `within` gives, of a task that runs already and has `grace` seconds (default `GRACE_SECONDS`) to clean up."""
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        in_time = task.done()
        await settle({task}, grace)
    if not in_time:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if task.cancelled():
        raise InfrastructureError("the call was cancelled from inside")
    return task.result()


class BlockingCalls:
    """Up to `limit` daemon threads, started as they are needed and kept; further calls wait their turn."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads = 0

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Awaits `function(*args, **kwargs)` in a thread, with the caller's context variables.

        A call that is cancelled while it waits for a thread never starts. `StopIteration` and `SystemExit`, which an
        event loop cannot carry, arrive as `RuntimeError`.
        """
        future: Future[R] = Future()
        bound = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        self._jobs.put(functools.partial(_fulfil, future, bound))
        self._ensure_thread()
        return await asyncio.wrap_future(future)

    def _ensure_thread(self) -> None:
        if self._idle.acquire(blocking=False):
            return
        with self._lock:
            if self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                self._idle.release()
                job = self._jobs.get()
            job()
            del job  # an idle thread must not keep the last call's arguments alive


def _fulfil(future: Future[R], function: Callable[[], R]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except (StopIteration, SystemExit) as error:
        carried = RuntimeError(f"{type(error).__name__}: {error}")
        carried.__cause__ = error
        future.set_exception(carried)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
