"""Listening: a bound socket, as many descriptors as are allowed, and a limit on connections.

Invariant: at most a certain number of connections are open, and a further one replaces the one that has been idle longest,
so that idle connections never keep a request out.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from etude.errors import ConfigError

HEAD_SECONDS = 10.0
_MOST_FILES = 1 << 16


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


def url_of(listener: socket.socket, host: str) -> str:
    """The address of a server that was told to listen on `host`."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"
