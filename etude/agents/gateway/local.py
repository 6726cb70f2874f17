"""`LocalGateway`: the gateway inside a rollout worker, for agents on the same machine; runs only while trajectories do.

Invariant: one server per event loop; it listens on 127.0.0.1 before the first session is opened and closes after the last
one is released. Signal handling stays with the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from weakref import WeakKeyDictionary

import uvicorn
from starlette.types import ASGIApp

from etude.agents.gateway.agent import Clients
from etude.agents.gateway.server import SessionStore, create_app
from etude.agents.gateway.session import GatewaySession
from etude.serving.listening import listen, raise_file_limit, server_config, url_of
from etude.timeouts import uninterrupted

_GRACE_SECONDS = 2
_MOST_REQUEST_MB = 128  # generous: each request repeats the history's images, and the agents are trusted


class BackgroundServer(uvicorn.Server):
    """A uvicorn server within the current event loop; its `serve` would take the signals, and poll ten times a second."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        host, _ = listener.getsockname()
        super().__init__(
            server_config(
                app, host, log_config=None, log_level="warning", lifespan="off", timeout_keep_alive=600,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )  # fmt: skip
        self._listener, self.url = listener, url_of(listener, host)

    async def start(self) -> None:
        """Starts to accept connections."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[self._listener])

    async def stop(self) -> None:
        """Shuts down, with a short grace period for open requests."""
        await self.shutdown(sockets=[self._listener])


class LocalGateway:
    """One event loop's gateway, created by `LocalGateway.here`; callers only need `opened`."""

    def __init__(self) -> None:
        self._store = SessionStore(max_sessions=1 << 20)
        self._open_sessions = 0
        self._server: BackgroundServer | None = None

    @staticmethod
    def here() -> LocalGateway:
        """Returns the gateway of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in _gateways:
            _gateways[loop] = LocalGateway()
        return _gateways[loop]

    @contextlib.asynccontextmanager
    async def opened(self, session: GatewaySession, tokenizer: object) -> AsyncIterator[tuple[str, str]]:
        """Serves `session`; yields (base URL, API key)."""
        self._open_sessions += 1
        secret = secrets.token_urlsafe(24)
        try:
            if self._server is None:
                raise_file_limit()
                app = create_app(self._store, tokenizer, max_request_mb=_MOST_REQUEST_MB)
                self._server = BackgroundServer(app, listen("127.0.0.1", 0))
                await uninterrupted(self._server.start())
            self._store.add(session, secret)
            yield f"{self._server.url}/s/{session.name}/v1", secret
        finally:
            self._store.remove(session.name)
            self._open_sessions -= 1
            if not self._open_sessions and self._server is not None:
                leaving, self._server = self._server, None
                await uninterrupted(_shut_down(leaving, Clients.taken()))


async def _shut_down(server: BackgroundServer, clients: list[Clients]) -> None:
    for each in clients:
        await each.close()
    await server.stop()


_gateways: WeakKeyDictionary[asyncio.AbstractEventLoop, LocalGateway] = WeakKeyDictionary()
