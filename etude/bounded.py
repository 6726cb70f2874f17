"""Calls that cannot hang: `within` puts a time limit on a coroutine, `BlockingCalls` moves blocking functions off the loop.

Invariant: whatever a user's code does (hang, swallow its cancellation, exit the interpreter), the caller gets an answer or
an exception in bounded time, and a cancelled caller leaves no call running that it did not try to stop. A thread cannot be
killed: a function that never returns holds its thread, but blocks neither its caller nor process exit.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
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
        RuntimeError: it raised `SystemExit`, which would end the event loop, or another exception that is no `Exception`.
    """
    try:
        awaitable = function(*args, **kwargs)
        if not inspect.isawaitable(awaitable):
            raise TypeError(f"{getattr(function, '__qualname__', function)} must be defined with 'async def'")
        return await awaitable
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def settle(tasks: Iterable[asyncio.Task[Any]], grace: float | None = None) -> None:
    """Cancels the `tasks` still running and waits up to `grace` seconds (default `GRACE_SECONDS`) for them to end.

    If the caller is cancelled meanwhile, that is raised afterwards, so that it cannot cut a clean-up short. Results and
    errors stay in the tasks; the event loop does not report those that are never read.
    """
    pending = set()
    for task in tasks:
        if task.done():
            _retrieve(task)
            continue
        pending.add(task)
        _strays.add(task)
        task.add_done_callback(_retrieve)
        task.cancel()
    if not pending:
        return
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


async def gather(coroutines: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Runs all at once; their results, in order. If one raises, or the caller is cancelled, the others are settled first."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return [*await asyncio.gather(*tasks)]
    finally:
        await settle(tasks)


async def within(seconds: float, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `await function(...)`, which is cancelled after `seconds`, or when the caller is.

    Raises:
        TimeoutError: no result in time.
        InfrastructureError: the call ended as cancelled although nobody had cancelled it.
    """
    return await result_of(asyncio.ensure_future(called(function, *args, **kwargs)), seconds)


async def result_of(task: asyncio.Task[R], seconds: float, grace: float | None = None) -> R:
    """Like `within`, for a task that is already running and has `grace` seconds (default `GRACE_SECONDS`) to clean up."""
    try:
        await asyncio.sleep(0)  # a task that waits for nothing has ended by then, and needs no timer
        if not task.done():
            await asyncio.wait({task}, timeout=seconds)
    except BaseException:
        await settle({task}, grace)
        raise
    if not task.done():
        await settle({task}, grace)
        raise TimeoutError(f"no answer within {seconds:g} s")
    if task.cancelled():
        raise InfrastructureError("the call was cancelled from inside")
    return task.result()


async def uninterrupted(work: Awaitable[R]) -> R:
    """The result of `work`, which runs to its end even if the caller is cancelled; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        _retrieve(task)
        raise cancelled
    return task.result()


def wake(waiter: asyncio.Future[None], *_: object) -> None:
    """Lets the one who awaits `waiter` go on; a waiter that is done stays as it is. Serves as a callback of any kind."""
    if not waiter.done():
        waiter.set_result(None)


def set_outcome(future: asyncio.Future[Any] | Future[Any], outcome: object) -> None:
    """Ends `future`, unless it is done: with `outcome` as its result or, if that is an exception, by raising it."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class BlockingCalls:
    """Up to `limit` daemon threads, started on demand and kept; further calls queue."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads = 0
        self._overdue: set[_TimedCall] = set()

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Awaits `function(*args, **kwargs)` in a thread, with the caller's context variables.

        A call that is cancelled while it waits for a thread never starts. `StopIteration`, which an event loop cannot
        carry, and exceptions that would end it (`SystemExit`, `KeyboardInterrupt` …) arrive as `RuntimeError`.
        """
        future: Future[R] = Future()
        bound = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        self._jobs.put(functools.partial(_fulfil, future, bound))
        self._ensure_thread()
        return await asyncio.wrap_future(future)

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result of a function that may be asynchronous: then it is awaited here, otherwise it runs in a thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await self.run(function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def run_within(self, seconds: float, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Like `run`, for at most `seconds` from the moment the function starts: waiting for a thread does not count.

        Raises:
            TimeoutError: it started and did not return in time (its thread is left to it), or `seconds` have passed while
                every thread was held by such a call.
            InfrastructureError: it ended as cancelled although nobody had cancelled it.
        """
        call = _TimedCall(self._overdue)
        task = asyncio.ensure_future(self.run(call, functools.partial(function, *args, **kwargs)))
        left, waited = seconds, False
        try:
            while left > 0 and not task.done():
                await asyncio.wait({task}, timeout=left)
                if call.started is not None:
                    left = call.started + seconds - time.monotonic()
                elif len(self._overdue) >= self._limit:
                    left, waited = 0.0, True
        finally:
            in_time = task.done()
            if not in_time:
                call.mark_overdue()
            await settle({task}, 0.0)
        if not in_time:
            why = "no thread is free: all are held by calls that do not return" if waited else "no answer"
            raise TimeoutError(f"{why} within {seconds:g} s")
        if task.cancelled():
            raise InfrastructureError("the call was cancelled from inside")
        return task.result()

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


class _TimedCall:
    """One call that knows when it started, and is listed in `overdue` from its time-out until it returns."""

    def __init__(self, overdue: set[_TimedCall]) -> None:
        self.started: float | None = None
        self._overdue, self._lock, self._returned = overdue, threading.Lock(), False

    def __call__(self, function: Callable[[], R]) -> R:
        self.started = time.monotonic()
        try:
            return function()
        finally:
            with self._lock:
                self._returned = True
                self._overdue.discard(self)

    def mark_overdue(self) -> None:
        with self._lock:
            if self.started is not None and not self._returned:
                self._overdue.add(self)


def _fulfil(future: Future[R], function: Callable[[], R]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
            return
        carried = RuntimeError(f"{type(error).__name__}: {error}")
        carried.__cause__ = error
        future.set_exception(carried)
    else:
        future.set_result(result)


_loops: dict[str, asyncio.AbstractEventLoop] = {}
_loops_lock = threading.Lock()


def background_loop(name: str) -> asyncio.AbstractEventLoop:
    """An event loop on a daemon thread called `name`, started on first use and kept: for services shared by several event
    loops and threads of this process."""
    with _loops_lock:
        loop = _loops.get(name)
        if loop is None:
            loop = _loops[name] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
        return loop


def _forget_loops() -> None:
    global _loops_lock
    _loops_lock = threading.Lock()  # a thread that the child does not have may have held the parent's
    _loops.clear()


os.register_at_fork(after_in_child=_forget_loops)
