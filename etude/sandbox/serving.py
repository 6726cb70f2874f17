"""`serve`: runs the sandbox server until it is stopped and its last run has ended.

Invariant: when `serve` returns or raises, no run, process or mount of the server is left. After SIGINT or SIGTERM no
requests are admitted, and active ones have `grace` seconds before they are answered 503. Connections never use up the file
descriptors for boxes: their number is limited, and at the limit a new one replaces the one that has been idle longest, so
idle connections never block a request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection

import uvicorn

from etude.sandbox.executor import Executor
from etude.sandbox.server import create_app
from etude.sandbox.service import SandboxService, ServerOptions
from etude.serving.listening import limited_protocol, listen, raise_file_limit, server_config, url_of

_MOST_CONNECTIONS = 4096
_OWN_FILES = 48  # descriptors of the server, and of connections that are accepted but not yet counted
_BOX_FILES = 11  # descriptors of a box while it is forked
_ACCEPTED_AT_ONCE = 8
_BACKLOG = 1024
_ANSWER_SECONDS = 10
"""Seconds that clients have to read their answers after the grace period."""


async def serve(
    options: ServerOptions,
    host: str = "127.0.0.1",
    port: int = 8080,
    grace: float = 30.0,
    ready: Callable[[str, Executor], None] | None = None,
    allow_hosts: Collection[str] = (),
) -> None:
    """Serves until SIGINT or SIGTERM; then runs have `grace` seconds to finish before they are killed.

    `ready` is called with the server's URL and executor once it listens; port 0 picks a free port; `allow_hosts`: see
    `server_config`.

    Raises:
        ConfigError: the address cannot be bound.
        SandboxUnavailableError: no isolation works here.
    """
    listener = listen(host, port)
    try:
        executor = await Executor.open(options.isolation, options.workers)
        app = create_app(executor, options)
        config = server_config(
            app,
            host,
            allow_hosts,
            timeout_graceful_shutdown=round(grace) + _ANSWER_SECONDS,
            timeout_keep_alive=30,
            http=limited_protocol(_most_connections(executor.workers)),
            backlog=_ACCEPTED_AT_ONCE,
            lifespan="on",
        )
        url = url_of(listener, host)
        server = _Server(config, app.state.service, grace, lambda: ready(url, executor) if ready else None)
        try:
            await server.serve(sockets=[listener])
        finally:
            await executor.close()
    finally:
        listener.close()


class _Server(uvicorn.Server):
    """Calls `ready` once it listens; on shutdown stops admitting requests, and cancels active ones after `grace` seconds."""

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
            listener.listen(_BACKLOG)  # uvicorn's smaller `backlog` also limits how many are accepted at once
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.admission.draining = True
        cut = asyncio.get_running_loop().call_later(self._grace, self._service.cut_short)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()


def _most_connections(workers: int) -> int:
    """Returns half of the file descriptors left by the boxes of `workers` runs; the other half is for sessions."""
    free = raise_file_limit() - _OWN_FILES - 2 * workers * _BOX_FILES
    return max(8, min(_MOST_CONNECTIONS, free // 2))
