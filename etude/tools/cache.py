"""`ResultCache`: caches the results of a tool whose `execute` is pure, and shares them between concurrent calls;
`ResultStore` keeps them, and recordings, which `recording` replays, in an SQLite file that processes share.

Pure means: the result (text, media, step reward and metrics) depends only on the arguments, the row's `create_kwargs` and
`execute_kwargs`, the tool's configuration and its code; and executing has no side effects. Enabling the cache declares that.

Invariant: a result is served only for an equal key; errors are never cached. At most one execution per key runs in this
event loop at a time, in the trajectory that asked first; if that trajectory is cancelled, the next waiting one executes
instead, with its own instance, so that no call outlives its trajectory. An entry of the file is read as a whole or not at
all, and is JSON: reading an untrusted file executes nothing. A file that fails (locked, full, deleted) costs its entries,
never a call: the failure is logged once and the file is no longer used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.errors import ConfigError, one_line
from etude.timeouts import BlockingCalls
from etude.tools.call import Source, ToolResult
from etude.tools.options import CachePolicy
from etude.tools.wire import result_from_json, result_to_json

_MAX_CHARACTERS = 2**28
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, stored REAL NOT NULL, answer TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS answers_by_age ON answers (stored)",
    "CREATE TABLE IF NOT EXISTS calls (tool TEXT, trajectory TEXT, event TEXT, row TEXT, asked TEXT, history TEXT, "
    "answer TEXT)",
    "CREATE INDEX IF NOT EXISTS calls_by_question ON calls (tool, row, asked)",
    "CREATE INDEX IF NOT EXISTS calls_by_number ON calls (tool, row, event)",
)
_LOCK_SECONDS = 5.0
_WRITES_BETWEEN_CLEANINGS = 64

logger = logging.getLogger(__name__)

_thread = BlockingCalls("etude-cache", limit=1)  # one thread: SQLite serializes writes anyway


class ResultCache:
    """An LRU cache of `max_entries` results in memory (at most 256 million characters), and a `ResultStore` at `path`."""

    def __init__(self, policy: CachePolicy) -> None:
        """Opens the file at `policy.path`, if set; raises ConfigError if that fails."""
        self._policy = policy
        self._entries: OrderedDict[str, tuple[float, ToolResult]] = OrderedDict()
        self._characters = 0
        self._in_flight: dict[tuple[int, str], asyncio.Future[ToolResult]] = {}
        self._store = None if policy.path is None else ResultStore(policy.path, policy.max_entries, policy.ttl)

    async def answer(self, key: str, execute: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """Returns the result for `key`: cached, shared with a running call, or from `execute()`.

        Raises:
            Exception: raised by `execute`, here or in the shared call.
        """
        loop = asyncio.get_running_loop()
        place = (id(loop), key)
        while True:
            cached = self._recall(key) or await self._recall_from_disk(key)
            if cached is not None:
                return cached
            flight = self._in_flight.get(place)
            if flight is None:
                break
            await asyncio.wait({flight})
            if not flight.cancelled():
                return _copy(flight.result(), Source.SHARED)
        flight = self._in_flight[place] = loop.create_future()
        try:
            answer = await execute()
        except Exception as error:
            flight.set_exception(error)
            flight.exception()  # mark as retrieved, in case nobody waits
            raise
        except BaseException:
            flight.cancel()
            raise
        else:
            if answer.error is None:
                self._keep(key, _copy(answer, Source.CACHE))
            flight.set_result(answer)
        finally:
            del self._in_flight[place]
        if self._store is not None and answer.error is None:
            with suppress(TypeError, ValueError):  # media that JSON and PNG cannot represent stay in memory
                await self._store.put(key, result_to_json(answer))
        return answer

    def _recall(self, key: str) -> ToolResult | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._policy.ttl is not None and time.monotonic() - entry[0] > self._policy.ttl:
            self._forget(key)
            return None
        self._entries.move_to_end(key)
        return _copy(entry[1], Source.CACHE)

    async def _recall_from_disk(self, key: str) -> ToolResult | None:
        record = None if self._store is None else await self._store.get(key)
        if record is None:
            return None
        try:
            return result_from_json(record, Source.CACHE)  # not kept in memory: that would reset its age
        except (KeyError, TypeError, ValueError, OSError, RecursionError):
            return None

    def _keep(self, key: str, answer: ToolResult) -> None:
        self._forget(key)
        self._entries[key] = (time.monotonic(), answer)
        self._characters += _length(answer)
        while len(self._entries) > self._policy.max_entries or self._characters > _MAX_CHARACTERS:
            self._forget(next(iter(self._entries)))

    def _forget(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._characters -= _length(entry[1])


def _length(answer: ToolResult) -> int:
    return len(answer.response.text or "")


def _copy(answer: ToolResult, source: Source) -> ToolResult:
    """Copies `answer` for another trajectory, which may modify it."""
    response = answer.response.model_copy(
        update={kind: list(media) for kind in ("image", "video") if (media := getattr(answer.response, kind))}
    )
    return replace(answer, response=response, metrics=dict(answer.metrics), source=source)


class ResultStore:
    """An SQLite file of up to `max_entries` results, the oldest deleted first; results older than `ttl` seconds (None: no
    limit) are ignored. Every access runs in a separate thread and waits for a locked file for a limited time."""

    def __init__(self, path: str | Path, max_entries: int, ttl: float | None) -> None:
        """Opens the file, creating it if needed.

        Raises:
            ConfigError: the file cannot be opened, or is not a cache file.
        """
        self._path = Path(path).expanduser()
        self._max_entries, self._ttl = max_entries, ttl
        self._connection: tuple[int, sqlite3.Connection] | None = None  # (process, connection)
        self._writes = 0
        self._failed = False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.select("SELECT key, stored, answer FROM answers LIMIT 1")
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"{self._path}: not a cache file: {one_line(error)}") from error

    def select(self, statement: str, *values: object) -> list[Any]:
        """Executes a statement; raises `sqlite3.Error`."""
        return self._open().execute(statement, values).fetchall()

    async def run(self, statement: str, *values: object) -> list[Any]:
        """Executes a statement in the thread; raises `sqlite3.Error`."""
        return await _thread.run(self.select, statement, *values)

    async def get(self, key: str) -> dict[str, Any] | None:
        """Returns the result stored under `key`; None if there is none or it has expired."""
        return None if self._failed else await _thread.run(self._get, "key = :key", key)

    async def latest(self, key: str) -> dict[str, Any] | None:
        """Like `get`, whichever code of the tool the result is of (`key:code`): the last stored."""
        if self._failed:
            return None
        return await _thread.run(self._get, "key = :key OR key BETWEEN :key || ':' AND :key || ';'", key)

    async def put(self, key: str, answer: Mapping[str, Any]) -> None:
        """Stores a result, replacing any previous one."""
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

    def _get(self, where: str, key: str) -> dict[str, Any] | None:
        try:
            statement = f"SELECT stored, answer FROM answers WHERE {where} ORDER BY stored DESC LIMIT 1"
            row = self._open().execute(statement, {"key": key}).fetchone()
            if row is None or (self._ttl is not None and not 0 <= time.time() - row[0] <= self._ttl):
                return None
            answer = json.loads(row[1])
            return answer if isinstance(answer, dict) else None
        except (sqlite3.Error, OSError, ValueError, RecursionError) as error:
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
