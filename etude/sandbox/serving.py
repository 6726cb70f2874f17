"""`serve`: runs the server on an address until its last run has ended.

Invariant: when `serve` returns or raises, no run, process or mount of the server is left. After SIGINT or SIGTERM no
request is admitted any more, and active ones have `grace` seconds before they are answered 503. Connections never use up
the boxes' descriptors: at most a certain number are open, and a further one replaces the one that has been idle longest, so
that idle connections never keep a request out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from etude.errors import ConfigError
from etude.sandbox.executor import Executor
from etude.sandbox.server import create_app
from etude.sandbox.service import SandboxService, ServerOptions

HEAD_SECONDS = 10.0
_MOST_FILES = 1 << 16
_MOST_CONNECTIONS = 4096
_OWN_FILES = 48  # the server's own, and those of connections that were accepted but not yet looked at
_BOX_FILES = 11  # of a box while it is forked
_ACCEPTED_AT_ONCE = 8
_BACKLOG = 1024
_ANSWER_SECONDS = 10
"""How long clients have to read their answers after the grace period."""


async def serve(
    options: ServerOptions,
    host: str = "127.0.0.1",
    port: int = 8080,
    grace: float = 30.0,
    ready: Callable[[str, Executor], None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM; then runs have `grace` seconds to finish before they are killed.

    `ready` is called with the server's URL when it listens; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be bound.
        SandboxUnavailableError: no isolation works here.
    """
    listener = listen(host, port)
    try:
        executor = await Executor.open(options.isolation, options.workers)
        app = create_app(executor, options)
        config = uvicorn.Config(
            app,
            log_level=os.environ.get("ETUDE_LOGGING_LEVEL", "warning").lower(),
            access_log=False,
            timeout_graceful_shutdown=round(grace) + _ANSWER_SECONDS,
            timeout_keep_alive=30,
            http=limited_protocol(_most_connections(executor.workers)),
            ws="none",
            backlog=_ACCEPTED_AT_ONCE,
            server_header=False,
            lifespan="on",
        )
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{listener.getsockname()[1]}"
        server = _Server(config, app.state.service, grace, lambda: ready(url, executor) if ready else None)
        try:
            await server.serve(sockets=[listener])
        finally:
            await executor.close()
    finally:
        listener.close()


class _Server(uvicorn.Server):
    """Reports when it listens, admits no request once closing, and cancels what is not done within `grace` seconds."""

    def __init__(
        self, config: uvicorn.Config, service: SandboxService, grace: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._grace = grace
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # asyncio's backlog is also how many it accepts before it handles any
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.admission.draining = True
        cut = asyncio.get_running_loop().call_later(self._grace, self._service.cut_short)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()


def limited_protocol(max_connections: int, head_seconds: float = HEAD_SECONDS) -> type[asyncio.Protocol]:
    """uvicorn's protocol for one server: at most `max_connections` are open, and a request's head has `head_seconds` to
    arrive (the body's time is left to `middleware.BodyLimit`)."""
    kept: set[asyncio.Protocol] = set()
    idle: dict[asyncio.Protocol, None] = {}  # ordered, the longest idle first

    class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            kept.add(self)
            self._await_head()
            if len(kept) > max_connections:
                next(iter(idle))._give_up()  # type: ignore[attr-defined]

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
            elif self._late is None:
                self._await_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # otherwise the next request has already arrived
                idle[self] = None

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            kept.discard(self)
            super().connection_lost(exc)

        def _give_up(self) -> None:
            self._stop_waiting()
            kept.discard(self)
            self.transport.abort()

        def _await_head(self) -> None:
            idle[self] = None
            self._late = self.loop.call_later(head_seconds, self._give_up)

        def _stop_waiting(self) -> None:
            idle.pop(self, None)
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return LimitedProtocol


def _most_connections(workers: int) -> int:
    """Half of the descriptors left by the boxes of `workers` runs; the other half is for sessions."""
    free = raise_file_limit() - _OWN_FILES - 2 * workers * _BOX_FILES
    return max(8, min(_MOST_CONNECTIONS, free // 2))


def raise_file_limit() -> int:
    """Raises this process's descriptor limit as far as allowed, to at most 65,536, and returns it: the default is often
    only 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections at the address, so that whoever is told it can connect; port 0 takes a free one.

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
