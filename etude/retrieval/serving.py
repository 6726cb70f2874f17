"""`serve`: runs the retrieval server on an address until SIGINT or SIGTERM.

Invariant: after a signal no requests are admitted, and active ones have `grace` seconds to be answered. The index is only
read, so a killed server can simply be restarted.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection

import uvicorn

from etude.retrieval.index import Retriever
from etude.retrieval.server import ServerOptions, create_app
from etude.serving.listening import limited_protocol, listen, raise_file_limit, server_config, url_of

_MOST_CONNECTIONS = 4096
_OWN_FILES = 64


async def serve(
    retriever: Retriever,
    options: ServerOptions,
    host: str = "127.0.0.1",
    port: int = 8000,
    grace: float = 10.0,
    ready: Callable[[str], None] = lambda url: None,
    allow_hosts: Collection[str] = (),
) -> None:
    """Serves until a signal; `ready` is called with the server's URL once it listens. Port 0 picks a free port;
    `allow_hosts`: see `server_config`.

    Raises:
        ConfigError: the address cannot be bound.
    """
    with listen(host, port) as listener:
        config = server_config(
            create_app(retriever, options),
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
