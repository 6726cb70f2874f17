"""Middleware of a server's endpoints: its own names, a bearer token, limits on the size of a request's body and the time it
takes to arrive, and cancellation of work for a client that has disconnected.

Invariant: no page of another site gets an answer, whatever DNS name leads it here, nor makes a browser send anything but a
GET; without the token no part of a body is read; no client can make the server hold more than `max_bytes` of a body, or wait
for it longer than `BODY_SECONDS`, and all together no more than a multiple of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etude.timeouts import settle

R = TypeVar("R")

OPEN_PATHS = {"/v1/ping", "/health"}
"""Paths that need no token."""
BODY_SECONDS = 60.0
_HELD_BODIES = 8  # bytes of all bodies at once, in multiples of `max_bytes`
_SMALL_BODY = 64 << 10
_DROPPED_BODIES = 4  # excess bytes to read and drop, in multiples of `max_bytes`
_DROP_SECONDS = 5.0


ErrorBody = Callable[[int, str], Any]
"""Builds the JSON body of an error from (status, message)."""


def _plain_error(status: int, message: str) -> dict[str, str]:
    return {"detail": message}


def is_loopback(host: str) -> bool:
    """Whether a server on `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class OwnNames:
    """Responds with 400 to a request whose `Host` is not a name of the server (DNS rebinding), and with 403 to one that a
    page of another origin makes a browser send, except GET, HEAD and OPTIONS.

    A server's names are `host`, the address that it listens on, `more`, `localhost`, and every IP address, since rebinding
    needs a DNS name; also names below `.localhost` and `.internal`, which nobody can register. Beyond loopback also this
    machine's name, single labels (as in a cluster or a container network) and `.local`: whoever controls those names is in
    the network, and reaches the server without them.
    """

    _SAFE = ("GET", "HEAD", "OPTIONS")

    def __init__(self, app: ASGIApp, host: str = "127.0.0.1", more: Collection[str] = ()) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower().rstrip(".") for name in (host, *more))}
        unregistered = r"[\w.-]+\.(localhost|internal)"
        if not is_loopback(host):
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
            unregistered += r"|[\w-]+|[\w.-]+\.local"
        self._unregistered = re.compile(unregistered, re.ASCII)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        hosts, origins = ([value for key, value in scope["headers"] if key == each] for each in (b"host", b"origin"))
        name = _name_in(hosts[0]) if len(hosts) == 1 else ""
        if not (name and (_is_address(name) or name in self._names or self._unregistered.fullmatch(name))):
            reason = f"'{name[:100]}' is not a name of this server: ask its address, or start it with --allow-host"
            return await JSONResponse(_plain_error(400, reason), 400)(scope, receive, send)
        if scope["method"] not in self._SAFE and not all(self._is_own(each, hosts[0]) for each in origins):
            return await JSONResponse(_plain_error(403, "a page of another origin"), 403)(scope, receive, send)
        await self._app(scope, receive, send)

    def _is_own(self, origin: bytes, host: bytes) -> bool:
        authority = origin.partition(b"://")[2]
        return (
            authority.lower() == host.lower() or _name_in(authority) in self._names or is_loopback(_name_in(authority))
        )


def _name_in(authority: bytes) -> str:
    """The name in `name:port` or `[address]:port`, in lower case."""
    text = authority.decode("latin-1").lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


class BodyLimit:
    """Responds with 413 to a body of more than `max_bytes`, and with 429 to one that would bring the bodies of all requests
    in progress above `_HELD_BODIES` times that; small ones always pass. Excess bytes are read and dropped, up to a limit,
    because a client that is still sending would see a broken connection instead of the response."""

    def __init__(self, app: ASGIApp, max_bytes: int, error_body: ErrorBody = _plain_error) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._error_body = error_body
        self._held = 0  # bytes of bodies of requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_bytes:
            await self._drop_rest(receive)
            return await JSONResponse(self._error_body(413, self._reason()), 413)(scope, receive, send)
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
            seen += (size := len(message.get("body", b"")))
            self._held += size
            if seen > self._max_bytes:
                await self._drop_rest(receive)
                raise HTTPException(413, self._reason())
            if seen > _SMALL_BODY and self._held > _HELD_BODIES * self._max_bytes:
                await self._drop_rest(receive)
                raise HTTPException(429, "the server holds too many large requests", {"Retry-After": "1"})
            whole = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= seen

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
    """Responds with 401 to a request without the token as a bearer token or as `x-api-key`; compares in constant time."""

    def __init__(self, app: ASGIApp, token: str, error_body: ErrorBody = _plain_error) -> None:
        self._app = app
        self._expected = b"Bearer " + token.encode()
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
        if hmac.compare_digest(given, self._expected):
            return await self._app(scope, receive, send)
        body = self._error_body(401, "a bearer token is required")
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)


async def unless_gone(request: Request, work: Coroutine[Any, Any, R]) -> R | None:
    """Returns the result of `work`; if the client disconnects first, cancels `work` and returns None."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        if not task.done():
            await settle({task})


async def hung_up(request: Request) -> None:
    """Returns once the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
