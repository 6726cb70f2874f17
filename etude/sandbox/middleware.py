"""What stands before the server's endpoints: a bearer token, and bounds on the size and the time of a request's body.

Invariant: without the token nothing of a body is read; no client makes the server hold more than `max_bytes` of a body,
or wait for it longer than `BODY_SECONDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = {"/v1/ping", "/health"}
"""Answered without a token."""
BODY_SECONDS = 60.0
_DROPPED_BODIES = 4  # times the largest body that is served
_DROP_SECONDS = 5.0


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`. What is too much is read and dropped, within measure, because a
    client that is still sending would see a broken connection instead of the answer."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_bytes:
            await self._drop_rest(receive)
            return await _send_json(send, 413, self._reason())
        clock = asyncio.get_running_loop().time
        seen, whole, due = 0, False, clock() + BODY_SECONDS

        async def counted() -> Message:
            nonlocal seen, whole
            if whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), due - clock())
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the request was not complete within {BODY_SECONDS:g} s") from None
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                await self._drop_rest(receive)
                raise HTTPException(413, self._reason())
            whole = not message.get("more_body", False)
            return message

        await self._app(scope, counted, send)

    async def _drop_rest(self, receive: Receive) -> None:
        async def drop() -> None:
            dropped, more = 0, True
            while more and dropped < _DROPPED_BODIES * self._max_bytes:
                message = await receive()
                dropped += len(message.get("body", b""))
                more = message.get("more_body", False)

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(drop(), _DROP_SECONDS)

    def _reason(self) -> str:
        return f"the request is larger than {self._max_bytes >> 20} MiB"


class BearerToken:
    """Answers 401 to a request without the token; the comparison takes the same time whatever was sent."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            return await self._app(scope, receive, send)
        await _send_json(send, 401, "a bearer token is required", (b"www-authenticate", b"Bearer"))


async def _send_json(send: Send, status: int, detail: str, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps({"detail": detail}).encode()
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
