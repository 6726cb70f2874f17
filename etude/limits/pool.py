"""`init_execution_pool`: runs functions in threads or processes under a cluster-wide concurrency limit.

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
from typing import Any, Generic, ParamSpec, TypeVar

from etude.bounded import GRACE_SECONDS
from etude.errors import ConfigError, InfrastructureError
from etude.limits.cluster import is_connected, open_limiter
from etude.limits.limit import Limit
from etude.limits.limiter import Permit

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


class _Method:
    """A function called as `f.remote(...)`, like the method of a Ray actor."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class ExecutionPool:
    """`execute.remote(function, *args, **kwargs)` and `ping.remote()`, until `close`."""

    def __init__(self, execute: Callable[..., Any], ping: Callable[[], Any], close: Callable[[], None]) -> None:
        self.execute = _Method(execute)
        self.ping = _Method(ping)
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
    mode = PoolMode(mode)
    if enable_global_rate_limit:
        open_limiter(name, Limit(max_concurrent=rate_limit))  # raise a conflict here, not in a worker
    if is_connected():
        return _actor_pool(num_workers, (enable_global_rate_limit, rate_limit, name), mode)
    worker = ExecutionWorker(enable_global_rate_limit, rate_limit, name)
    return _local_pool(num_workers, worker, None if mode is PoolMode.ThreadMode else _Processes(num_workers))


def _local_pool(num_workers: int, worker: ExecutionWorker, processes: _Processes | None) -> ExecutionPool:
    """Creates a pool without Ray. A thread waits for the permit and for the process, so that a process that dies cannot
    keep a permit."""
    threads = ThreadPoolExecutor(num_workers, thread_name_prefix="etude-pool")

    def execute(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Pending[T]:
        if processes is None:
            return Pending(threads.submit(worker.execute, function, *args, **kwargs))
        return Pending(threads.submit(worker.execute, processes.run, function, *args, **kwargs))

    def close() -> None:
        threads.shutdown(wait=False, cancel_futures=True)
        if processes is not None:
            processes.close()

    return ExecutionPool(execute, lambda: Pending(threads.submit(worker.ping)), close)


class _Processes:
    """A pool of spawned processes, all of which are replaced when one of them dies."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._executor = self._start()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._count, mp_context=get_context("spawn"))

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        executor = self._executor
        try:
            return executor.submit(function, *args, **kwargs).result()
        except BrokenProcessPool as error:
            with self._lock:
                if self._executor is executor:
                    self._executor = self._start()
            raise InfrastructureError("a process of the pool died while it ran, or beside, this function") from error

    def close(self) -> None:
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

    def least_busy() -> int:
        with lock:
            index = min(range(workers), key=loads.__getitem__)
            loads[index] += 1
        return index

    def done(index: int) -> None:
        with lock:
            loads[index] -= 1

    def execute(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        index = least_busy()
        reference = actors[index].execute.remote(function, *args, **kwargs)
        if workers > 1:
            reference.future().add_done_callback(lambda _: done(index))
        return reference

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
