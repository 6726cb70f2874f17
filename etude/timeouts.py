"""Calls with a timeout: `within` limits the time of a coroutine, `BlockingCalls` runs blocking functions in threads.

Invariant: whatever a user's code does (hang, swallow its cancellation, call `sys.exit`), the caller gets a result or an
exception in bounded time, and a cancelled caller cancels the calls that it started. A thread cannot be killed: a function
that never returns occupies its thread, but blocks neither its caller nor process exit.
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

from etude.errors import ConfigError, InfrastructureError

P = ParamSpec("P")
R = TypeVar("R")

GRACE_SECONDS = 5.0  # for a cancelled call to clean up after itself

_strays: set[asyncio.Task[Any]] = set()  # cancelled tasks that still run; referenced so that none is garbage-collected


async def called(function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Awaits `function(...)`, such that it is safe to run as a task.

    Raises:
        ConfigError: `function` is not asynchronous.
        RuntimeError: it raised `SystemExit`, which would end the event loop, or another exception that is no `Exception`.
    """
    try:
        awaitable = function(*args, **kwargs)
        if not inspect.isawaitable(awaitable):
            raise ConfigError(f"{getattr(function, '__qualname__', function)} must be defined with 'async def'")
        return await awaitable
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def settle(tasks: Iterable[asyncio.Task[Any]], grace: float | None = None) -> None:
    """Cancels those of `tasks` that are running and waits up to `grace` seconds (default `GRACE_SECONDS`) for them to end.

    If the caller is cancelled meanwhile, the cancellation is raised afterwards, so that it does not cut the clean-up short.
    Results and exceptions stay in the tasks; the event loop does not log exceptions that are never retrieved.
    """
    pending = set()
    for task in tasks:
        if task.done():
            retrieve(task)
            continue
        pending.add(task)
        _strays.add(task)
        task.add_done_callback(retrieve)
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


def retrieve(task: asyncio.Future[Any]) -> None:
    """A callback of tasks whose end nobody may look at: the event loop then logs no exception."""
    _strays.discard(task)
    if not task.cancelled():
        task.exception()


async def gather(coroutines: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Runs the coroutines concurrently and returns their results in order. If one raises, or the caller is cancelled, the
    others are cancelled, and waited for as by `settle`, before the exception is raised."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return [*await asyncio.gather(*tasks)]
    finally:
        await settle(tasks)


async def within(seconds: float, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Returns the result of `await function(...)`; cancels the call after `seconds`, or when the caller is cancelled.

    Raises:
        TimeoutError: no result in time.
        InfrastructureError: the call ended as cancelled, although neither this function nor the caller cancelled it.
    """
    return await result_of(asyncio.ensure_future(called(function, *args, **kwargs)), seconds)


async def result_of(
    task: asyncio.Task[R], seconds: float, grace: float | None = None, key: str = "", spent: float = 0.0
) -> R:
    """Like `within`, for a task that is already running; it has `grace` seconds (default `GRACE_SECONDS`) to clean up.
    `key`: the configuration key that sets `seconds`, for the error; `spent`: how many of them have passed."""
    try:
        await asyncio.sleep(0)  # a task that never waits is done after this, and needs no timer
        if not task.done():
            await asyncio.wait({task}, timeout=max(seconds - spent, 0.0))
    except BaseException:
        await settle({task}, grace)
        raise
    if not task.done():
        await settle({task}, grace)
        raise TimeoutError(f"no answer within {seconds:g} s" + (f" ({key})" if key else ""))
    if task.cancelled():
        raise InfrastructureError("the call was cancelled from inside")
    return task.result()


async def awaited(awaitable: Awaitable[R]) -> R:
    """Makes a coroutine of what a user's function returned to be waited for."""
    return await awaitable


async def uninterrupted(work: Awaitable[R]) -> R:
    """Returns the result of `work`, which runs to completion even if the caller is cancelled; the cancellation is raised
    afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        retrieve(task)
        raise cancelled
    return task.result()


def wake(waiter: asyncio.Future[None], *_: object) -> None:
    """Sets the result of `waiter` unless it is done, so that the task awaiting it continues. Usable as a callback."""
    if not waiter.done():
        waiter.set_result(None)


def set_outcome(future: asyncio.Future[Any] | Future[Any], outcome: object) -> None:
    """Sets `outcome` as the result of `future`, or as its exception if it is one; does nothing if `future` is done."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class BlockingCalls:
    """A thread pool of up to `limit` daemon threads, started on demand and kept; further calls are queued."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads = 0
        self._overdue: set[_TimedCall] = set()

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `function(*args, **kwargs)` in a thread, with the caller's context variables, and returns its result.

        A call that is cancelled while it waits for a thread never starts. `StopIteration`, which a future cannot hold, and
        exceptions that would end the event loop (`SystemExit`, `KeyboardInterrupt` …) are raised as `RuntimeError`.
        """
        future: Future[R] = Future()
        bound = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        self._jobs.put(functools.partial(_fulfil, future, bound))
        self._ensure_thread()
        return await asyncio.wrap_future(future)

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs a sync function in a thread, or awaits an async one here; returns its result."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await self.run(function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def call_within(self, seconds: float, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Like `call`, with one timeout of `seconds` for the function and what it returns to be waited for; raises as
        `run_within`."""
        if inspect.iscoroutinefunction(function):
            return await within(seconds, function, *args, **kwargs)
        began = 0.0

        def call() -> Any:
            nonlocal began
            began = time.monotonic()
            return function(*args, **kwargs)

        result = await self.run_within(seconds, call)
        if not inspect.isawaitable(result):
            return result
        task = asyncio.ensure_future(called(awaited, result))
        return await result_of(task, seconds, spent=time.monotonic() - began)

    async def run_within(self, seconds: float, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Like `run`, with a timeout of `seconds` from the start of the function: waiting for a thread does not count.

        Raises:
            TimeoutError: the function did not return in time (it keeps its thread until it does), or `seconds` passed while
                calls that had timed out occupied every thread.
            InfrastructureError: the call ended as cancelled, although neither this method nor the caller cancelled it.
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

    def end(self) -> None:
        """Lets the threads end, each after the call that it runs; the object is not used again."""
        for _ in range(self._threads):
            self._jobs.put(None)

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
            if job is None:
                return
            job()
            del job  # an idle thread must not keep the last call's arguments alive


class _TimedCall:
    """A call that records when it started, and is in `overdue` from its timeout until it returns."""

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
    process = os.getpid()
    try:
        result = function()
    except BaseException as error:
        end_fork(process)
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
            return
        carried = RuntimeError(f"{type(error).__name__}: {error}")
        carried.__cause__ = error
        future.set_exception(carried)
    else:
        end_fork(process)
        future.set_result(result)


def end_fork(process: int) -> None:
    """Ends this process if it is a fork of `process` that a function forgot: it would wait for calls for ever, or answer
    them a second time."""
    if os.getpid() != process:
        os._exit(0)


_loops: dict[str, asyncio.AbstractEventLoop] = {}
_loops_lock = threading.Lock()


def background_loop(name: str) -> asyncio.AbstractEventLoop:
    """Returns the event loop that runs in the daemon thread `name`, and starts it on first use: for services shared by
    several event loops and threads of this process."""
    with _loops_lock:
        loop = _loops.get(name)
        if loop is None:
            loop = _loops[name] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
        return loop


async def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, R]) -> R:
    """Runs `work` in the `loop` of another thread; cancelling the caller cancels `work`."""

    async def watched() -> R:
        # A caller who leaves just as `work` fails retrieves no error, which asyncio would log.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(retrieve)
        return await work

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(watched(), loop))


def _forget_loops() -> None:
    global _loops_lock
    _loops_lock = threading.Lock()  # a thread of the parent may have held the old lock
    _loops.clear()


os.register_at_fork(after_in_child=_forget_loops)
