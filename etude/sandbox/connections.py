"""Limits a server's connections, and the time a client may take to send a request.

Invariant: at most `max_connections` are open; a further one replaces the one that has been idle longest, so that idle
connections never keep a request out. A request's head must arrive within `head_seconds` (the body's time is left to
`middleware.BodyLimit`).
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 10.0


def limited_protocol(max_connections: int, head_seconds: float = HEAD_SECONDS) -> type[asyncio.Protocol]:
    """uvicorn's protocol within these limits; all connections of one server share it."""
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
