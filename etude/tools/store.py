"""`ResultStore`: caches answers on disk, in one SQLite file shared by processes.

Invariant: an entry is read whole or not at all, and is JSON: reading a file that someone else wrote executes nothing. A
file that fails (locked, full, gone) costs its entries, never a call: the failure is logged once and the store is no
longer used. Every access runs in its own thread, with a time limit on locks.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.bounded import BlockingCalls
from etude.errors import ConfigError, one_line

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, stored REAL NOT NULL, answer TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS answers_by_age ON answers (stored)",
)
_LOCK_SECONDS = 5.0
_WRITES_BETWEEN_CLEANINGS = 64

logger = logging.getLogger(__name__)

_thread = BlockingCalls("etude-cache", limit=1)  # one thread: SQLite serialises writes anyway


class ResultStore:
    """At most `max_entries` answers, the oldest deleted first, none older than `ttl` seconds (None: any age)."""

    def __init__(self, path: str | Path, max_entries: int, ttl: float | None) -> None:
        """Opens the file, creating it if needed.

        Raises:
            ConfigError: it cannot be opened, or is not a cache file.
        """
        self._path = Path(path).expanduser()
        self._max_entries, self._ttl = max_entries, ttl
        self._connection: tuple[int, sqlite3.Connection] | None = None  # (process, connection)
        self._writes = 0
        self._failed = False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._open().execute("SELECT key, stored, answer FROM answers LIMIT 1").fetchall()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"{self._path}: not a cache file: {one_line(error)}") from error

    async def get(self, key: str) -> dict[str, Any] | None:
        """The answer stored under `key`, if any has not expired."""
        return None if self._failed else await _thread.run(self._get, key)

    async def put(self, key: str, answer: Mapping[str, Any]) -> None:
        """Stores an answer, replacing any previous one."""
        if not self._failed:
            await _thread.run(self._put, key, json.dumps(answer))

    def _open(self) -> sqlite3.Connection:
        if self._connection is None or self._connection[0] != os.getpid():
            made = sqlite3.connect(self._path, timeout=_LOCK_SECONDS, isolation_level=None, check_same_thread=False)
            self._connection = (os.getpid(), made)
            made.execute("PRAGMA journal_mode=WAL")
            made.execute("PRAGMA synchronous=NORMAL")
            for statement in _SCHEMA:
                made.execute(statement)
        return self._connection[1]

    def _get(self, key: str) -> dict[str, Any] | None:
        try:
            row = self._open().execute("SELECT stored, answer FROM answers WHERE key = ?", (key,)).fetchone()
            if row is None or (self._ttl is not None and not 0 <= time.time() - row[0] <= self._ttl):
                return None
            answer = json.loads(row[1])
            return answer if isinstance(answer, dict) else None
        except (sqlite3.Error, OSError, ValueError) as error:
            self._give_up(error)
            return None

    def _put(self, key: str, answer: str) -> None:
        try:
            connection = self._open()
            connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (key, time.time(), answer))
            self._writes += 1
            if self._writes % _WRITES_BETWEEN_CLEANINGS == 0 or self._max_entries <= _WRITES_BETWEEN_CLEANINGS:
                self._clean(connection)
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)

    def _clean(self, connection: sqlite3.Connection) -> None:
        if self._ttl is not None:
            connection.execute("DELETE FROM answers WHERE stored < ?", (time.time() - self._ttl,))
        connection.execute(
            "DELETE FROM answers WHERE key IN (SELECT key FROM answers ORDER BY stored DESC, key LIMIT -1 OFFSET ?)",
            (self._max_entries,),
        )

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        logger.warning("%s: the cache on disk is disabled: %s", self._path, one_line(error))
