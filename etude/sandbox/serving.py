"""`serve`: the server on an address, from its start to the end of its last run.

Invariant: when `serve` returns or raises, no run, process or mount of the server is left. After SIGINT or SIGTERM nobody
gets in any more, and those inside have `grace` seconds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import uvicorn

from etude.errors import ConfigError
from etude.sandbox.admission import Admission
from etude.sandbox.executor import Executor
from etude.sandbox.server import ServerOptions, create_app


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
            timeout_graceful_shutdown=max(1, round(grace)),
            timeout_keep_alive=30,
            server_header=False,
            lifespan="on",
        )
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{listener.getsockname()[1]}"
        server = _Server(config, app.state.service.admission, lambda: ready(url, executor) if ready else None)
        try:
            await server.serve(sockets=[listener])
        finally:
            await executor.close()
    finally:
        listener.close()


class _Server(uvicorn.Server):
    """Says when it listens, and lets nobody in once it is closing."""

    def __init__(self, config: uvicorn.Config, admission: Admission, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._admission = admission
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._admission.draining = True
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener
