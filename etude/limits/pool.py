"""The documents' names for a limit and for functions that run under one: `TokenBucketWorker`, `ExecutionWorker`,
`init_execution_pool`.

Invariant: a function that raises returns its permit, and its exception is raised by its result. With Ray, the workers are
actors and results are object references (`ray.get`, `await`); without Ray, the workers are threads and processes of this
machine, and results are `Pending` (`await`, `result`). Either way the call is
`pool.execute.remote(function, *args, **kwargs)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from enum import Enum
from multiprocessing import get_context
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, Generic, ParamSpec, TypeVar

from etude.errors import ConfigError, InfrastructureError
from etude.limits.cluster import is_connected, open_limiter
from etude.limits.local import Limit, Permit
from etude.timeouts import GRACE_SECONDS

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_LIMITER = "rate-limiter"


class PoolMode(Enum):
    """Whether functions run in threads or in processes."""

    ThreadMode = 1
    """Threads of one process: cheap, for I/O-bound functions."""
    ProcessMode = 2
    """Separate processes, for CPU-bound functions; functions, arguments and results must be picklable."""


class TokenBucketWorker:
    """A semaphore of `rate_limit` permits under one name, for code that pairs `acquire` with `release`.

    Every process creates its own object; all share the limit. Prefer `open_limiter`, whose permits are context managers.
    """

    def __init__(self, rate_limit: int, name: str = DEFAULT_LIMITER) -> None:
        self.rate_limit = rate_limit
        self._limiter = open_limiter(name, Limit(max_concurrent=rate_limit))
        self._permits: deque[Permit] = deque()

    def acquire(self, timeout: float | None = None) -> None:
        """Blocks until a permit is granted, first come, first served; raises TimeoutError after `timeout` seconds."""
        self._permits.append(self._limiter.acquire_blocking(timeout))

    def release(self) -> None:
        """Returns a permit.

        Raises:
            RuntimeError: no permit is held.
        """
        try:
            permit = self._permits.popleft()
        except IndexError:
            raise RuntimeError("release without acquire") from None
        permit.release()

    def get_current_count(self) -> int:
        """Returns the number of permits held through this object."""
        return len(self._permits)


class ExecutionWorker:
    """Runs functions under the limit, in this process or as a Ray actor (`ray.remote(ExecutionWorker)`)."""

    def __init__(
        self, enable_global_rate_limit: bool = True, rate_limit: int = 10, name: str = DEFAULT_LIMITER
    ) -> None:
        self._limiter = open_limiter(name, Limit(max_concurrent=rate_limit)) if enable_global_rate_limit else None

    def ping(self) -> bool:
        """Returns True if the worker is up."""
        return True

    def execute(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Waits for a permit, then calls `function(*args, **kwargs)`; returns or raises what the function does."""
        with self._limiter.permit() if self._limiter is not None else contextlib.nullcontext():
            return function(*args, **kwargs)


class Pending(Generic[T]):
    """A pending result: `await` it, or block on `result`."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout: float | None = None) -> T:
        """Waits for the function; returns its result or raises its exception, TimeoutError after `timeout` seconds."""
        return self._future.result(timeout)


class ExecutionPool:
    """`execute.remote(function, *args, **kwargs)` and `ping.remote()`, until `close`."""

    def __init__(self, execute: Callable[..., Any], ping: Callable[[], Any], close: Callable[[], None]) -> None:
        self.execute = SimpleNamespace(remote=execute)
        self.ping = SimpleNamespace(remote=ping)
        self._close = close

    def close(self) -> None:
        """Stops the workers: running processes are killed (Ray's after a short grace period), a thread of this process
        finishes its current function."""
        self._close()

    def __enter__(self) -> ExecutionPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def init_execution_pool(
    num_workers: int,
    enable_global_rate_limit: bool = True,
    rate_limit: int = 10,
    mode: PoolMode = PoolMode.ThreadMode,
    name: str = DEFAULT_LIMITER,
) -> ExecutionPool:
    """Creates a pool of `num_workers` threads or processes; at most `rate_limit` calls run at once in the whole cluster,
    under the limiter `name`.

    Raises:
        ConfigError: a number is not positive, or the limiter's name is taken by another limit.
    """
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
        raise ConfigError(f"num_workers must be a whole number from 1, not {num_workers!r}")
    options = enable_global_rate_limit, rate_limit, name
    worker = ExecutionWorker(*options)  # raises a conflict here, not in an actor
    if is_connected():
        return _actor_pool(num_workers, options, PoolMode(mode))
    return _local_pool(num_workers, worker, PoolMode(mode))


def _local_pool(num_workers: int, worker: ExecutionWorker, mode: PoolMode) -> ExecutionPool:
    """Creates a pool without Ray. A thread waits for the permit and for the process, so that a process that dies cannot
    keep a permit."""
    threads = ThreadPoolExecutor(num_workers, thread_name_prefix="etude-pool")
    processes = [_Process() for _ in range(num_workers if mode is PoolMode.ProcessMode else 0)]
    free: SimpleQueue[_Process] = SimpleQueue()
    for process in processes:
        free.put(process)

    def in_process(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        process = free.get()
        try:
            return process.run(function, *args, **kwargs)
        finally:
            free.put(process)

    def execute(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Pending[T]:
        call = (in_process, function) if processes else (function,)
        return Pending(threads.submit(worker.execute, *call, *args, **kwargs))

    def close() -> None:
        threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()

    return ExecutionPool(execute, lambda: Pending(threads.submit(worker.ping)), close)


class _Process:
    """A spawned process that runs one function at a time, and is replaced when it dies."""

    def __init__(self) -> None:
        self._executor = self._start()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        try:
            return self._executor.submit(function, *args, **kwargs).result()
        except BrokenProcessPool as error:
            self._executor = self._start()
            raise InfrastructureError("a process of the pool died while it ran this function") from error

    def kill(self) -> None:
        children = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.kill()


def _actor_pool(num_workers: int, options: tuple[bool, int, str], mode: PoolMode) -> ExecutionPool:
    import ray

    workers, threads = (1, num_workers) if mode is PoolMode.ThreadMode else (num_workers, 1)
    remote = ray.remote(ExecutionWorker).options(max_concurrency=threads, num_cpus=0)
    actors: list[Any] = [remote.remote(*options) for _ in range(workers)]
    loads = [0] * workers
    lock = threading.Lock()

    def execute(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with lock:
            index = min(range(workers), key=loads.__getitem__)  # the least busy
            loads[index] += 1
        reference = actors[index].execute.remote(function, *args, **kwargs)
        if workers > 1:
            reference.future().add_done_callback(lambda _: done(index))
        return reference

    def done(index: int) -> None:
        with lock:
            loads[index] -= 1

    def kill() -> None:
        if ray.is_initialized():
            for actor in actors:
                ray.kill(actor)

    def close() -> None:
        for actor in actors:
            actor.__ray_terminate__.remote()  # a normal exit returns the permits at once
        killer = threading.Timer(GRACE_SECONDS, kill)
        killer.daemon = True
        killer.start()

    return ExecutionPool(execute, lambda: actors[0].ping.remote(), close)
