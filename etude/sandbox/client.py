"""`SandboxClient`: runs code in a sandbox embedded in this process or on a server.

Invariant: a result is always about the code. Any other failure (of the sandbox or the network, or a server that is busy or
down) is retried and then raised as `SandboxError`, an infrastructure failure; it never looks like a wrong answer. A cell of
a session never runs twice. A client may be used from any thread and any event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import random
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from etude.bounded import background_loop
from etude.errors import ConfigError
from etude.sandbox.executor import SESSION_LIMITS, Executor
from etude.sandbox.types import CellResult, Isolation, Limits, RunRequest, RunResult, SandboxError

if TYPE_CHECKING:
    from etude.sandbox.remote import RemoteSandbox

R = TypeVar("R")

CLOSE_SECONDS = 10.0
FIRST_PAUSE = 0.2  # seconds before the first retry; doubled for each further one


_Call = Callable[["Executor | RemoteSandbox"], Coroutine[Any, Any, R]]


class SandboxClient:
    """A sandbox client. `url`: the address of `etude sandbox serve` or of any server compatible with Sandbox Fusion; None:
    a sandbox embedded in this process, shared by all clients with the same settings."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        attempts: int = 3,
        workers: int | None = None,
        isolation: Isolation | str = Isolation.AUTO,
    ) -> None:
        """`attempts`: maximum attempts at a run if the sandbox fails; `workers` and `isolation`: of the embedded sandbox.

        Raises:
            ConfigError: `url` is not an HTTP address, or `attempts` is not positive.
        """
        if attempts < 1:
            raise ConfigError(f"attempts must be at least 1, not {attempts}")
        self.url = url
        self._attempts = attempts
        self._loop = background_loop("etude-sandbox")
        self._sandbox = _embedded(Isolation(isolation), workers) if url is None else _remote(url, token)
        self._closed = False
        _clients.add(self)

    async def run(self, request: RunRequest) -> RunResult:
        """Runs a program from a fresh state.

        Raises:
            SandboxError: the sandbox failed `attempts` times.
            SandboxRequestError: the request is invalid; it is not retried.
            ConfigError: the server's address or token is wrong.
        """
        return await self._here(lambda sandbox: sandbox.run(request), self._attempts)

    def run_blocking(self, request: RunRequest) -> RunResult:
        """Runs a program like `run`, for threads without an event loop."""
        return self._submit(lambda sandbox: sandbox.run(request), self._attempts).result()

    async def session(self, limits: Limits = SESSION_LIMITS, files: Mapping[str, bytes] | None = None) -> str:
        """Opens a session, whose variables persist from cell to cell; returns its id.

        Raises:
            SandboxError: the sandbox failed `attempts` times.
            ConfigError: the server does not support sessions.
        """
        return await self._here(lambda sandbox: sandbox.session(limits, files or {}), self._attempts)

    async def run_cell(self, session_id: str, code: str, timeout: float) -> CellResult:
        """Runs a cell, for at most `timeout` seconds; never retried, because it may have run.

        Raises:
            UnknownSessionError: there is no such session (any more).
            SandboxError: the sandbox failed.
        """
        return await self._here(lambda sandbox: sandbox.run_cell(session_id, code, timeout))

    async def close_session(self, session_id: str) -> None:
        """Closes a session; an unknown id is not an error."""
        await self._here(lambda sandbox: sandbox.close_session(session_id))

    async def aclose(self) -> None:
        """Closes the client like `close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Closes connections and, if this is its last client, the embedded executor."""
        if self._closed:
            return
        self._closed = True
        _clients.discard(self)
        closing = asyncio.run_coroutine_threadsafe(self._sandbox.close(), self._loop)
        with contextlib.suppress(Exception):
            closing.result(CLOSE_SECONDS)

    async def __aenter__(self) -> SandboxClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _here(self, call: _Call[R], attempts: int = 1) -> R:
        """Makes a call on the client's event loop; cancelling the caller cancels it."""
        return await asyncio.wrap_future(self._submit(call, attempts))

    def _submit(self, call: _Call[R], attempts: int) -> Future[R]:
        if self._closed:
            raise RuntimeError("this sandbox client is closed")
        return asyncio.run_coroutine_threadsafe(self._try(call, attempts), self._loop)

    async def _try(self, call: _Call[R], attempts: int) -> R:
        pause = FIRST_PAUSE
        for left in range(attempts - 1, -1, -1):
            try:
                return await call(await self._sandbox.open())
            except SandboxError as error:
                if attempts == 1:
                    raise
                if not left:
                    raise SandboxError(f"{error} (tried {attempts} times)") from error
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause *= 2
        raise AssertionError("unreachable")


def _remote(url: str, token: str | None) -> RemoteSandbox:
    from etude.sandbox.remote import RemoteSandbox  # imports an HTTP client, which the embedded sandbox does not need

    return RemoteSandbox(url, token)


class _Embedded:
    """This process's executor for one set of settings: opened by the first call, closed with its last client."""

    def __init__(self, isolation: Isolation, workers: int | None) -> None:
        self.clients = 0
        self._isolation = isolation
        self._workers = workers
        self._executor: Executor | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> Executor:
        async with self._lock:
            if self._executor is None:
                self._executor = await Executor.open(self._isolation, self._workers)
            return self._executor

    async def close(self) -> None:
        with _embedded_lock:
            self.clients -= 1
            if self.clients:
                return
        async with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            await executor.close()


_executors: dict[tuple[Isolation, int | None], _Embedded] = {}
_embedded_lock = threading.Lock()
_clients: set[SandboxClient] = set()


def _embedded(isolation: Isolation, workers: int | None) -> _Embedded:
    with _embedded_lock:
        embedded = _executors.setdefault((isolation, workers), _Embedded(isolation, workers))
        embedded.clients += 1
        return embedded


@atexit.register
def _close_all() -> None:
    for client in list(_clients):
        client.close()
