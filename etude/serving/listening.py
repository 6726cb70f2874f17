"""Listening: a bound socket, uvicorn's settings that all servers share, the limit on file descriptors, a limit on
connections, and `serve`, which runs an application until a signal.

Invariant: every server refuses foreign names and origins (`middleware.OwnNames`), on all of its paths. At most
`max_connections` are open; a further one replaces the one that has been idle longest, so that idle connections never keep a
request out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Callable, Collection
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from etude.errors import ConfigError
from etude.serving.middleware import OwnNames

HEAD_SECONDS = 10.0
_MAX_FILES = 1 << 16
_MOST_CONNECTIONS = 4096
_OWN_FILES = 64


def limited_protocol(max_connections: int, head_seconds: float = HEAD_SECONDS) -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol class for one server, with at most `max_connections` open, and `head_seconds` for the head
    of a request to arrive (`middleware.BodyLimit` limits the time of the body)."""
    open_connections: set[asyncio.Protocol] = set()
    idle: dict[asyncio.Protocol, None] = {}  # ordered, longest idle first

    class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            open_connections.add(self)
            self._await_head()
            if len(open_connections) > max_connections:
                next(iter(idle))._give_up()  # type: ignore[attr-defined]

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
            elif self._head_timer is None:
                self._await_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # otherwise the next request has already arrived
                idle[self] = None

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            open_connections.discard(self)
            super().connection_lost(exc)

        def _give_up(self) -> None:
            self._stop_waiting()
            open_connections.discard(self)
            self.transport.abort()

        def _await_head(self) -> None:
            idle[self] = None
            self._head_timer = self.loop.call_later(head_seconds, self._give_up)

        def _stop_waiting(self) -> None:
            idle.pop(self, None)
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return LimitedProtocol


def raise_file_limit() -> int:
    """Raises this process's limit on file descriptors as far as allowed, to at most 65,536, and returns it. The default is
    often only 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_FILES if soft == resource.RLIM_INFINITY else soft


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that already listens at the address, so that clients can connect as soon as they know it; port 0
    picks a free port.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def server_config(app: ASGIApp, host: str, allow_hosts: Collection[str] = (), **more: Any) -> uvicorn.Config:
    """Returns uvicorn's configuration for `app` on `host`; `allow_hosts` are further DNS names that it is reached by."""
    shared = {"access_log": False, "server_header": False, "ws": "none"}
    level = os.environ.get("ETUDE_LOGGING_LEVEL", "warning").lower()
    return uvicorn.Config(OwnNames(app, host, allow_hosts), **{"log_level": level, **shared, **more})


def url_of(listener: socket.socket, host: str) -> str:
    """Returns the URL of a server that listens on `host`."""
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{listener.getsockname()[1]}"


async def serve(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    grace: float,
    ready: Callable[[str], None],
    allow_hosts: Collection[str] = (),
) -> None:
    """Serves `app` until SIGINT or SIGTERM; then no requests are admitted, and active ones have `grace` seconds to be
    answered. `ready` is called with the server's URL once it listens. Port 0 picks a free port; `allow_hosts`: see
    `server_config`.

    Raises:
        ConfigError: the address cannot be bound.
    """
    with listen(host, port) as listener:
        config = server_config(
            app,
            host,
            allow_hosts,
            timeout_graceful_shutdown=max(1, round(grace)),
            timeout_keep_alive=60,
            http=limited_protocol(max(8, min(_MOST_CONNECTIONS, raise_file_limit() - _OWN_FILES))),
            backlog=1024,
            lifespan="on",
        )
        await _Server(config, lambda: ready(url_of(listener, host))).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Calls `ready` once it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()
