"""`JsonService`: JSON requests to one HTTP service, limited in time and size.

Invariant: a response is limited to `max_body_bytes`, before and after decompression; redirects are not followed; errors name
only the host, so that no key in a header or URL reaches a log or a model. A service's connections live in one background
event loop, shared by all event loops of the process, and are closed with the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import weakref
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from etude.errors import InfrastructureError, ToolError, one_line, seconds_of
from etude.timeouts import background_loop, run_on

_REFUSED_BY_CONTENT = (400, 413, 414, 422)  # the client errors that the model's arguments can cause
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PIECE_BYTES = 1 << 16
_HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "etude"}


class Unavailable(InfrastructureError):
    """The service answered with an error status, and, in `Retry-After`, when to ask again: in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class JsonService:
    """A client of the service at `url`, with at most `connections` concurrent requests."""

    def __init__(
        self,
        url: str,
        *,
        connections: int = 100,
        max_body_bytes: int = 4_000_000,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url
        self.host = urlsplit(url).netloc.rpartition("@")[2]
        self._through_proxy = urlsplit(url).hostname not in _LOOPBACK
        self._connections = connections
        self._max_body_bytes = max_body_bytes
        self._headers = {**_HEADERS, **(headers or {})}
        self._sessions: dict[int, _Session] = {}  # by process id, as a forked child needs its own
        weakref.finalize(self, _close, self._sessions)

    async def request(
        self,
        method: str,
        *,
        seconds: float,
        params: Mapping[str, str] | None = None,
        body: object | None = None,
    ) -> Any:
        """Sends one request and returns the decoded JSON of the response.

        Raises:
            ToolError: the service rejects the model's request (HTTP 400, 413, 414, 422).
            InfrastructureError: no response within `seconds`, no connection, another status than 2xx, or a response that
                is too long or not JSON.
        """
        status, answer, retry_after = await self._send(method, self.url, seconds, params=params, json=body)
        self._check(status, retry_after)
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            raise InfrastructureError(f"{self.host} answered with something that is not JSON") from None

    async def fetch(
        self,
        method: str,
        *,
        seconds: float,
        params: Mapping[str, str] | None = None,
        body: object | None = None,
        url: str | None = None,
    ) -> tuple[int, bytes, float]:
        """Sends one request and returns (status, body, seconds that `Retry-After` asks for), whatever the status; `url`
        replaces the service's URL, on the same host.

        Raises:
            InfrastructureError: no response within `seconds`, no connection, or a response that is too long.
        """
        status, answer, retry_after = await self._send(method, url or self.url, seconds, params=params, json=body)
        return status, answer, seconds_of(retry_after)

    async def _send(self, method: str, url: str, seconds: float, **details: Any) -> tuple[int, bytes, str]:
        work = self._fetch(method, url, timeout=aiohttp.ClientTimeout(total=seconds), **details)
        try:
            return await run_on(background_loop("etude-http"), work)
        except asyncio.TimeoutError:
            raise InfrastructureError(f"{self.host} gave no answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # `from None`: an aiohttp error contains the whole URL, including any key in it.
            line = one_line(error).replace(url, self.host)
            raise InfrastructureError(f"{self.host} is not reachable: {type(error).__name__}: {line}") from None

    async def _fetch(self, method: str, url: str, **details: Any) -> tuple[int, bytes, str]:
        process = os.getpid()
        if process not in self._sessions:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=self._through_proxy,
            )
            self._sessions[process] = _Session(asyncio.get_running_loop(), threading.get_ident(), session)
        async with self._sessions[process].client.request(method, url, allow_redirects=False, **details) as response:
            return response.status, await self._read(response), response.headers.get("Retry-After", "")

    def _check(self, status: int, retry_after: str) -> None:
        if status in _REFUSED_BY_CONTENT:
            raise ToolError(f"Error: the service refuses this request (HTTP {status}); change it")
        if not 200 <= status < 300:
            hint = (
                "; check the address and the key in the tool's config" if 300 <= status < 500 and status != 429 else ""
            )
            raise Unavailable(f"{self.host} answered with HTTP {status}{hint}", seconds_of(retry_after))

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        too_long = InfrastructureError(f"{self.host} answered with more than {self._max_body_bytes} bytes")
        try:
            return await read_body(response, self._max_body_bytes, too_long)
        except ValueError as error:
            raise InfrastructureError(f"{self.host} answered with {one_line(error)}") from None


async def read_body(response: aiohttp.ClientResponse, limit: int, too_long: Exception) -> bytes:
    """Reads the body of a response to a session with `auto_decompress=False`; raises `too_long` if it is longer than `limit`
    bytes, decompressed.

    Raises:
        ValueError: it is not compressed as its header says.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in decompress(response.content.iter_any(), response.headers.get("Content-Encoding", "")):
        size += len(chunk)
        if size > limit:
            raise too_long
        chunks.append(chunk)
    return b"".join(chunks)


async def decompress(chunks: AsyncIterable[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yields the content of a body in pieces of bounded size, so that its reader can count before more is decompressed.

    `encoding` is the header Content-Encoding: some services compress unasked, by gzip or deflate.

    Raises:
        ValueError: another encoding, or a body that does not have it.
    """
    if encoding.strip().lower() in ("", "identity"):
        async for chunk in chunks:
            yield chunk
        return
    if encoding.strip().lower() not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"a body compressed by {encoding[:40]!r}, which was not asked for")
    decoder = zlib.decompressobj(wbits=47)  # gzip or zlib, detected by the header
    try:
        async for chunk in chunks:
            while chunk and not decoder.eof:
                yield decoder.decompress(chunk, _PIECE_BYTES)
                chunk = decoder.unconsumed_tail
        yield decoder.flush()
    except zlib.error as error:
        raise ValueError(f"something that is not compressed as it says ({encoding})") from error


class _Session(NamedTuple):
    loop: asyncio.AbstractEventLoop
    thread: int
    client: aiohttp.ClientSession


def _close(sessions: dict[int, _Session]) -> None:
    """Closes this process's session. Called by the garbage collector, in any thread, or at exit, so it takes no lock that
    its caller may hold."""
    session = sessions.get(os.getpid())
    if session is None:
        return
    with contextlib.suppress(Exception):  # the process may be exiting
        closing = asyncio.run_coroutine_threadsafe(session.client.close(), session.loop)
        if threading.get_ident() != session.thread:
            closing.result(1.0)
