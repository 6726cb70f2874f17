"""`HttpServer`: requests to one inference server, limited in time and size; every failure is an `EngineError`.

Invariant: a call returns the server's response or raises `EngineError` with one line that names the address, whether the
server refuses the connection, hangs, or returns an error status, too much data or garbage. Every call has its own
connection: cancelling its task closes the connection, and the server then stops generating.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp

from etude.errors import EngineError, one_line
from etude.serving.json_service import read_body

MAX_ANSWER_BYTES = 256 << 20  # a long generation's ids and log-probs take about 1 % of it


class StatusError(EngineError):
    """The server responded with the error status `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HttpServer:
    """A client of the server at `url`; `timeout` in seconds limits a whole call, including connecting and reading."""

    def __init__(self, url: str, *, timeout: float, api_key: str | None = None) -> None:
        self.url, self.timeout = url, timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def get(self, path: str) -> bytes:
        """Sends a GET request and returns the response's body."""
        return await self._call("GET", path, None)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> bytes:
        """POSTs JSON and returns the response's body."""
        return await self._call("POST", path, body or {}, query=query, timeout=timeout)

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """POSTs JSON and returns the JSON object in the response; arguments as for `post`."""
        return self.object(path, await self.post(path, body, **options))

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Turns missing keys and wrong types in an answer that is read inside into an `EngineError`."""
        try:
            yield
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EngineError(
                f"{self.url}{path}: the answer lacks a part: {type(error).__name__} {one_line(error, 80)}"
            ) from error

    def object(self, path: str, body: bytes) -> dict[str, Any]:
        """Parses the JSON object in a response's body."""
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.url}{path}: the answer is not JSON: {one_line(error, 80)}") from error
        if not isinstance(answer, dict):
            raise EngineError(f"{self.url}{path}: the answer is JSON, but no object: {_excerpt(body)}")
        return answer

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        query: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> bytes:
        seconds = self.timeout if timeout is None else timeout
        where = f"{self.url}{path}"
        limit = aiohttp.ClientTimeout(total=seconds)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers=self._headers, auto_decompress=False) as session,
                session.request(method, where, json=body, params=query) as response,
            ):
                status = response.status
                too_long = EngineError(f"{where}: the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB")
                data = await read_body(response, MAX_ANSWER_BYTES, too_long)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise EngineError(f"{where}: no answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"{where}: {type(error).__name__}: {one_line(error)}") from error
        if status >= 300:
            raise StatusError(f"{where}: status {status}: {_excerpt(data)}", status)
        return data


def _excerpt(body: bytes) -> str:
    return one_line(ValueError(body[:2000].decode("utf-8", "replace")), 200) if body.strip() else "(empty)"
