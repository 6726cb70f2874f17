"""`RemoteSandbox`: the client of a server with Sandbox Fusion's HTTP API.

Invariant: an answer about the code becomes a result; a failed connection, an invalid answer and every status of 500 and
above become `SandboxError`. A busy server (429) is retried after its `Retry-After`, for up to `BUSY_SECONDS`: being busy is
not a failure. Answers are limited in size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ValidationError

from etude.errors import ConfigError, one_line
from etude.json_service import read_body
from etude.sandbox import wire
from etude.sandbox.types import (
    CellResult,
    Limits,
    RunRequest,
    RunResult,
    SandboxError,
    SandboxRequestError,
    SessionClosedError,
    UnknownSessionError,
)

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R")

BUSY_SECONDS = 600.0
MAX_RETRY_AFTER = 30.0
MARGIN_SECONDS = 80.0
"""Timeout of an HTTP call beyond the code's own limits, for the server's queue and the sandbox's work."""
CONNECT_SECONDS = 10.0
MAX_ANSWER_BYTES = 256 << 20
MAX_CONNECTIONS = 256


class RemoteSandbox:
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

    async def open(self) -> RemoteSandbox:
        """Returns itself; the first call connects."""
        return self

    async def run(self, request: RunRequest) -> RunResult:
        """Runs a program; raises like `SandboxClient.run`."""
        body = wire.run_code_request(request)
        seconds = body.run_timeout + body.compile_timeout
        answer = await self._call("POST", "/run_code", body, wire.RunCodeResponse, seconds)
        return self._translate(wire.run_result, answer)

    async def session(self, limits: Limits, files: Mapping[str, bytes]) -> str:
        """Opens a session, which only `etude sandbox serve` supports; returns its id."""
        body = wire.SessionRequest(memory_limit_MB=limits.memory_mb, files=dict(wire.encode_files(files)))
        return (await self._call("POST", "/v1/sessions", body, wire.SessionResponse, 0.0)).session_id

    async def run_cell(self, session_id: str, code: str, timeout: float) -> CellResult:
        """Runs a cell of a session; raises like `SandboxClient.run_cell`."""
        body = wire.CellRequest(code=code, timeout=timeout)
        path = f"/v1/sessions/{session_id}/cells"
        return self._translate(wire.cell_result, await self._call("POST", path, body, wire.CellResponse, timeout))

    async def close_session(self, session_id: str) -> None:
        """Closes a session."""
        await self._call("DELETE", f"/v1/sessions/{session_id}", None, None, 0.0)

    def _translate(self, translate: Callable[[M], R], answer: M) -> R:
        try:
            return translate(answer)
        except SandboxRequestError as error:  # invalid data in the answer, not in the request
            raise SandboxError(f"{self._url} answered nonsense: {error}") from error

    async def close(self) -> None:
        """Closes the connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _call(self, method: str, path: str, body: BaseModel | None, answer: type[M] | None, seconds: float) -> M:
        """Makes a call, retried while the server is busy.

        Raises:
            SandboxError, SandboxRequestError, UnknownSessionError, ConfigError: depending on the status.
        """
        data = None if body is None else _json(body)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BUSY_SECONDS
        while True:
            status, retry_after, content = await self._send(method, path, data, seconds + MARGIN_SECONDS)
            if status != 429:
                break
            if loop.time() + retry_after > deadline:
                raise SandboxError(f"{self._url} was busy for {BUSY_SECONDS:g} s")
            await asyncio.sleep(retry_after)
        self._raise_for(status, path, content)
        if answer is None:
            return None  # type: ignore[return-value]
        try:
            return answer.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the whole"
            raise SandboxError(f"{self._url}{path} answered nonsense: {where}: {first['msg']}") from error

    async def _send(self, method: str, path: str, data: bytes | None, seconds: float) -> tuple[int, float, bytes]:
        """Returns the response's status, the seconds to wait if it is 429, and the body."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS), headers=self._headers, auto_decompress=False
            )
        headers = {"Content-Type": "application/json"} if data is not None else {}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._http.request(
                method, self._url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                too_long = SandboxError(f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
                body = await read_body(response, MAX_ANSWER_BYTES, too_long)
                return response.status, _retry_after(response.headers), body
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise SandboxError(f"{self._url}{path}: {type(error).__name__}: {one_line(error)}") from error

    def _raise_for(self, status: int, path: str, content: bytes) -> None:
        if 200 <= status < 300:
            return
        reason = one_line(Exception(_detail(content)))
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


def _json(body: BaseModel) -> bytes:
    try:
        return body.model_dump_json().encode()
    except ValueError as error:  # a lone surrogate cannot be encoded
        raise SandboxRequestError(f"the request is no valid text: {one_line(error)}") from error


def _retry_after(headers: Mapping[str, str]) -> float:
    text = headers.get("Retry-After", "")
    return min(MAX_RETRY_AFTER, max(0.05, float(text))) if text.isdigit() else 1.0


def _detail(content: bytes) -> str:
    import json

    text = content[:2000].decode("utf-8", "replace")
    with_detail: Any = None
    try:
        with_detail = json.loads(text)
    except ValueError:
        return text
    return str(with_detail.get("detail", text)) if isinstance(with_detail, dict) else text
