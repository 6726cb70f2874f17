"""`SandboxClient`: runs code in a sandbox embedded in this process, or on a server with Sandbox Fusion's HTTP API.

Invariant: a result is always about the code. Any other failure (of the sandbox, the network or the server, an invalid or
endless answer) is retried and then raised as `SandboxError`, an infrastructure failure; it never looks like a wrong answer.
A busy server (429) is retried after its `Retry-After`, for up to `BUSY_SECONDS`: being busy is not a failure. A cell of a
session never runs twice. A client may be used from any thread and any event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import random
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from etude.errors import ConfigError, one_line
from etude.sandbox import fusion
from etude.sandbox.executor import SESSION_LIMITS, Executor, ExecutorOptions
from etude.sandbox.types import (
    CellResult,
    Isolation,
    Limits,
    RunRequest,
    RunResult,
    SandboxError,
    SandboxRequestError,
    SessionClosedError,
    UnknownSessionError,
)
from etude.timeouts import background_loop

if TYPE_CHECKING:
    import aiohttp

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R")

CLOSE_SECONDS = 10.0
FIRST_PAUSE = 0.2  # seconds before the first retry; doubled for each further one
BUSY_SECONDS = 600.0
MAX_RETRY_AFTER = 30.0
MARGIN_SECONDS = 80.0
"""Timeout of an HTTP call beyond the code's own limits, for the server's queue and the sandbox's work."""
CONNECT_SECONDS = 10.0
MAX_ANSWER_BYTES = 256 << 20
MAX_CONNECTIONS = 256


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
        folders: tuple[str, ...] = (),
    ) -> None:
        """`attempts`: maximum attempts at a run if the sandbox fails; `workers`, `isolation` and `folders`, which programs
        can read besides: of the embedded sandbox.

        Raises:
            ConfigError: `url` is not an HTTP address, or `attempts` is not positive.
        """
        if attempts < 1:
            raise ConfigError(f"attempts must be at least 1, not {attempts}")
        self.url = url
        self._attempts = attempts
        self._loop = background_loop("etude-sandbox")
        self._sandbox = _embedded(Isolation(isolation), workers, folders) if url is None else _RemoteSandbox(url, token)
        self._closed = False
        _clients.add(self)

    async def run(self, request: RunRequest) -> RunResult:
        """Runs a program from a fresh state.

        Raises:
            SandboxError: the sandbox failed `attempts` times.
            SandboxRequestError: the request is invalid; it is not retried.
            ConfigError: the server's address or token is wrong.
        """
        return await asyncio.wrap_future(self._submit(lambda sandbox: sandbox.run(request), self._attempts))

    def run_blocking(self, request: RunRequest) -> RunResult:
        """Runs a program like `run`, for threads without an event loop."""
        return self._submit(lambda sandbox: sandbox.run(request), self._attempts).result()

    async def session(self, limits: Limits = SESSION_LIMITS, files: Mapping[str, bytes] | None = None) -> str:
        """Opens a session, whose variables persist from cell to cell; returns its id.

        Raises:
            SandboxError: the sandbox failed `attempts` times.
            ConfigError: the server does not support sessions.
        """
        opening = self._submit(lambda sandbox: sandbox.session(limits, files or {}), self._attempts)
        return await asyncio.wrap_future(opening)

    async def run_cell(self, session_id: str, code: str, timeout: float) -> CellResult:
        """Runs a cell, for at most `timeout` seconds; never retried, because it may have run.

        Raises:
            UnknownSessionError: there is no such session (any more).
            SandboxError: the sandbox failed.
        """
        return await asyncio.wrap_future(self._submit(lambda sandbox: sandbox.run_cell(session_id, code, timeout)))

    async def close_session(self, session_id: str) -> None:
        """Closes a session; an unknown id is not an error."""
        await asyncio.wrap_future(self._submit(lambda sandbox: sandbox.close_session(session_id)))

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

    def _submit(
        self, call: Callable[[Executor | _RemoteSandbox], Coroutine[Any, Any, R]], attempts: int = 1
    ) -> Future[R]:
        """Makes a call on the client's event loop; cancelling the future cancels it."""
        if self._closed:
            raise RuntimeError("this sandbox client is closed")

        async def retried() -> R:
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

        return asyncio.run_coroutine_threadsafe(retried(), self._loop)


class _Embedded:
    """This process's executor for one set of settings: opened by the first call, closed with its last client."""

    def __init__(self, isolation: Isolation, workers: int | None, folders: tuple[str, ...]) -> None:
        self.clients = 0
        self._settings = isolation, workers, ExecutorOptions(folders=folders)
        self._executor: Executor | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> Executor:
        async with self._lock:
            if self._executor is None:
                self._executor = await Executor.open(*self._settings)
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


_executors: dict[tuple[Isolation, int | None, tuple[str, ...]], _Embedded] = {}
_embedded_lock = threading.Lock()
_clients: set[SandboxClient] = set()


def _embedded(isolation: Isolation, workers: int | None, folders: tuple[str, ...]) -> _Embedded:
    with _embedded_lock:
        settings = isolation, workers, folders
        embedded = _executors.setdefault(settings, _Embedded(*settings))
        embedded.clients += 1
        return embedded


@atexit.register
def _close_all() -> None:
    for client in list(_clients):
        client.close()


class _RemoteSandbox:
    """A client of one server. Bound to the event loop of its first call."""

    def __init__(self, url: str, token: str | None) -> None:
        """`url` may end in `/run_code`, as in verl's configurations.

        Raises:
            ConfigError: it is not an HTTP address.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"sandbox URL: {url!r} is not of the form http://host:port")
        self._url = url.rstrip("/").removesuffix("/run_code").rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> _RemoteSandbox:
        """Returns itself; the first call connects."""
        return self

    async def run(self, request: RunRequest) -> RunResult:
        """Runs a program; raises like `SandboxClient.run`."""
        body = fusion.run_code_request(request)
        seconds = body.run_timeout + body.compile_timeout
        return fusion.run_result(await self._call("/run_code", body, fusion.RunCodeResponse, seconds))

    async def session(self, limits: Limits, files: Mapping[str, bytes]) -> str:
        """Opens a session, which only `etude sandbox serve` supports; returns its id."""
        body = fusion.SessionRequest(memory_limit_MB=limits.memory_mb, files=dict(fusion.encode_files(files)))
        return (await self._call("/v1/sessions", body, fusion.SessionResponse, 0.0)).session_id

    async def run_cell(self, session_id: str, code: str, timeout: float) -> CellResult:
        """Runs a cell of a session; raises like `SandboxClient.run_cell`."""
        body = fusion.CellRequest(code=code, timeout=timeout)
        answer = await self._call(f"/v1/sessions/{session_id}/cells", body, fusion.CellResponse, timeout)
        return fusion.cell_result(answer)

    async def close_session(self, session_id: str) -> None:
        await self._exchange("DELETE", f"/v1/sessions/{session_id}", None, 0.0)

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _call(self, path: str, body: BaseModel, answer: type[M], seconds: float) -> M:
        """Posts `body` and returns the answer; raises like `_exchange`."""
        try:
            data = body.model_dump_json().encode()
        except ValueError as error:  # a lone surrogate cannot be encoded
            raise SandboxRequestError(f"the request is no valid text: {one_line(error)}") from error
        content = await self._exchange("POST", path, data, seconds)
        try:
            return answer.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the whole"
            raise SandboxError(f"{self._url}{path} answered nonsense: {where}: {first['msg']}") from error

    async def _exchange(self, method: str, path: str, data: bytes | None, seconds: float) -> bytes:
        """Sends a request, retried while the server is busy, and returns the body of the answer.

        Raises:
            SandboxError, SandboxRequestError, UnknownSessionError, ConfigError: depending on the status.
        """
        import aiohttp  # which the embedded sandbox does not need

        from etude.serving.json_service import read_body

        if self._http is None:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS)
            self._http = aiohttp.ClientSession(connector=connector, headers=self._headers, auto_decompress=False)
        headers = {"Content-Type": "application/json"} if data is not None else {}
        timeout = aiohttp.ClientTimeout(total=seconds + MARGIN_SECONDS, sock_connect=CONNECT_SECONDS)
        too_long = SandboxError(f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BUSY_SECONDS
        while True:
            try:
                async with self._http.request(
                    method, self._url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
                ) as response:
                    content = await read_body(response, MAX_ANSWER_BYTES, too_long)
                    status, text = response.status, response.headers.get("Retry-After", "")
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
                raise SandboxError(f"{self._url}{path}: {type(error).__name__}: {one_line(error)}") from error
            if status != 429:
                self._raise_for(status, path, content)
                return content
            pause = min(MAX_RETRY_AFTER, max(0.05, float(text))) if text.isdigit() else 1.0
            if loop.time() + pause > deadline:
                raise SandboxError(f"{self._url} was busy for {BUSY_SECONDS:g} s")
            await asyncio.sleep(pause)

    def _raise_for(self, status: int, path: str, content: bytes) -> None:
        if 200 <= status < 300:
            return
        text = content[:2000].decode("utf-8", "replace")
        with contextlib.suppress(ValueError, RecursionError, AttributeError):  # no JSON, or no object
            text = str(json.loads(text).get("detail", text))
        reason = one_line(Exception(text))
        if status in (404, 405):
            if path.startswith("/v1/sessions/"):
                raise UnknownSessionError(reason)
            needs = "stateful code needs `etude sandbox serve`" if path == "/v1/sessions" else "is this a sandbox?"
            raise ConfigError(f"{self._url} has no {path}: {needs}")
        if status in (400, 413, 422):
            raise SandboxRequestError(f"{self._url} refuses the request: {reason}")
        if status in (401, 403):
            raise ConfigError(f"{self._url} wants another bearer token ({status}): set ETUDE_SANDBOX_TOKEN")
        failure = SessionClosedError if status == 410 else SandboxError
        raise failure(f"{self._url} answered {status}: {reason}")
