"""`SessionStore`: the sessions of a server, by name, and who may use them.

Invariant: at most `max_sessions` at once, including those of a single request. A session created here by a request (`make`
is given) ends once: when asked to, after `idle_seconds` idle, or at server shutdown; then `on_end` gets it.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from etude.agents.gateway.errors import GatewayError
from etude.agents.gateway.session import GatewaySession

_NAME = re.compile(r"[A-Za-z0-9._~-]{1,128}")


@dataclass(frozen=True)
class _Entry:
    session: GatewaySession
    secret: str | None


class SessionStore:
    """Sessions are added, or created by `make(name)` on their first request."""

    def __init__(
        self,
        *,
        max_sessions: int = 4096,
        idle_seconds: float | None = None,
        make: Callable[[str], GatewaySession] | None = None,
        on_end: Callable[[GatewaySession], None] | None = None,
    ) -> None:
        self.max_sessions, self.idle_seconds = max_sessions, idle_seconds
        self._make, self._on_end = make, on_end
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def makes(self, name: str) -> bool:
        """Whether a request would now create the session `name`."""
        return self._make is not None and name not in self._entries

    def add(self, session: GatewaySession, secret: str | None) -> None:
        """Adds a session, whose requests must carry `secret`."""
        self._entries[session.name] = _Entry(session, secret)

    def remove(self, name: str) -> None:
        """Rejects its requests from now on; does not end it."""
        self._entries.pop(name, None)

    def get(self, name: str, key: str) -> GatewaySession:
        """The session `name` for a request that carries `key`.

        Raises:
            GatewayError: the session does not exist, or the key is not its own.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise GatewayError(404, f"there is no session '{name[:128]}' (any more)", code="session_not_found")
        if entry.secret is not None and not hmac.compare_digest(key.encode(), entry.secret.encode()):
            raise GatewayError(401, "the API key is not this session's", code="invalid_api_key")
        return entry.session

    def get_or_make(self, name: str, key: str) -> GatewaySession:
        """As `get`, or a new session, if the store creates them.

        Raises:
            GatewayError: as `get`, or the name is invalid, or there are too many sessions.
        """
        if self._make is None or name in self._entries:
            return self.get(name, key)
        if not _NAME.fullmatch(name):
            raise GatewayError(400, "a session's name has up to 128 letters, digits and . _ ~ -", param="session")
        if len(self) >= self.max_sessions:
            raise GatewayError(429, f"all {self.max_sessions} sessions are in use: end some", again=True)
        session = self._make(name)
        self.add(session, None)
        return session

    def end(self, session: GatewaySession) -> None:
        """Ends a session that was created here, unless it has ended."""
        entry = self._entries.get(session.name)
        if entry is None or entry.session is not session:
            return
        self.remove(session.name)
        session.end()
        if self._on_end is not None:
            self._on_end(session)

    def end_all(self) -> None:
        """Ends all of them."""
        for entry in list(self._entries.values()):
            self.end(entry.session)

    async def end_idle(self) -> None:
        """Ends sessions idle for `idle_seconds`, until cancelled."""
        assert self.idle_seconds is not None
        while True:
            await asyncio.sleep(min(self.idle_seconds / 4, 10.0))
            before = time.monotonic() - self.idle_seconds
            for session in [entry.session for entry in self._entries.values()]:
                if not session.under_way and session.last_used < before:
                    self.end(session)
