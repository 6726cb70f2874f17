"""`Recording`: everything that one tool answered, in the table `calls` of a cache file. `config.record` writes it; a cache
that is read only (`config.cache.only`, or `config.replay`) serves it, and no method of the tool is ever called.

Invariant: only what the recording determines is served; otherwise `MissingCall` names the question. In `strict` mode that is
the answer to the same question (the row's arguments for the tool, and the call's) after the same earlier calls of the
trajectory (of several trajectories, the one of the same request id, else the first recorded), or else the one answer that
the question always got. In `order` mode it is the answer to the call of the same number in the trajectory of the same
request id, or else the one answer that this number always got with these `create_kwargs`. Infrastructure failures are not
recorded.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Literal

from etude.errors import ConfigError, DataError, one_line
from etude.tools.cache import ResultStore
from etude.tools.call import Source, ToolResult
from etude.tools.wire import result_from_json, result_to_json

_MAX_SHOWN_CHARS = 200
_HINT = "record the run again, or set replay.mode to order"


class MissingCall(DataError):
    """The recording has no answer to a question, several that differ, or one that cannot be read."""


class Recording:
    """The recording of a tool. `only`: it answers in place of the tool.

    A question is put by `kwargs` within an event of a trajectory ("create", the number of a call, "calc_reward"), where
    `row` are the `create_kwargs`, both as canonical JSON, and `history` stands for the calls so far.
    """

    def __init__(self, path: str, tool: str, mode: Literal["strict", "order"] | None = None) -> None:
        """Opens the file; a `mode` serves it, None writes it.

        Raises:
            ConfigError: the file cannot be opened.
            DataError: there is no file to serve, or it has no call of this tool.
        """
        self._tool, self._in_order, self.only = tool, mode == "order", mode is not None
        self._where = f"tool '{tool}': {path}"
        if self.only and not Path(path).expanduser().is_file():
            raise DataError(f"{self._where} cannot be read: there is no such file")
        self._store = ResultStore(path, max_entries=0, ttl=None)
        recorded = self._store.select("SELECT 1 FROM calls WHERE tool = ? LIMIT 1", tool)
        self._is_cache = not recorded and bool(self._store.select("SELECT 1 FROM answers LIMIT 1"))
        if self.only and not recorded and not self._is_cache:
            raise DataError(f"{self._where} holds no call of this tool")

    async def keep(self, trajectory: str, event: str, row: str, kwargs: str, history: str, result: ToolResult) -> None:
        """Records an answer.

        Raises:
            ConfigError: that is not possible (an image of an unknown type, a full disk): a recording must not lack a call.
        """
        try:
            answer = json.dumps(result_to_json(result))
            values = (self._tool, trajectory, event, row, _question(event, kwargs), history, answer)
            await self._store.run("INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?)", *values)
        except (TypeError, ValueError, sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"tool '{self._tool}': its answer cannot be recorded: {one_line(error)} (config.record)"
            ) from error

    async def find(self, trajectory: str, event: str, row: str, kwargs: str, history: str, key: str = "") -> ToolResult:
        """Returns the recorded answer; `key` is that of a call in a cache. A cache holds calls only: in the file of one, the
        other events have empty answers.

        Raises:
            MissingCall: the recording does not determine the answer.
        """
        asked = _question(event, kwargs)
        what, preferred = ("event", "trajectory") if self._in_order else ("asked", "history")
        values = (trajectory, self._tool, row, event) if self._in_order else (history, self._tool, row, asked)
        statement = (  # of trajectories that are alike so far, the one of this request id is the one being replayed
            f"SELECT answer, {preferred} = ? FROM calls WHERE tool = ? AND row = ? AND {what} = ? "
            "ORDER BY trajectory != ?, rowid"
        )
        try:
            if self._is_cache:
                kept = await self._store.latest(key) if key else {}
                found = [] if kept is None else [(result_from_json(kept, Source.REPLAY), True)]
            else:
                rows = await self._store.run(statement, *values, trajectory)
                found = [(result_from_json(json.loads(answer), Source.REPLAY), alike) for answer, alike in rows]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError, OSError, sqlite3.Error) as error:
            raise MissingCall(f"{self._where} is damaged: {type(error).__name__}: {one_line(error)}") from error
        what = f"{event} of {trajectory}" if self._in_order else _shorten(asked)
        if not found:
            raise MissingCall(f"{self._where} holds no {what}, with create_kwargs {_shorten(row)}: {_HINT}")
        alike = [result for result, same in found if same][:1]
        first, *others = alike or [result for result, _ in found]
        if any(
            (each.response, each.reward, each.error) != (first.response, first.reward, first.error) for each in others
        ):
            raise MissingCall(
                f"{self._where} holds different answers to {what}, with create_kwargs {_shorten(row)}, and none of the same "
                f"trajectory so far: {_HINT}"
            )
        return first


def _question(event: str, kwargs: str) -> str:
    return f"{'call' if event.isdigit() else event} {kwargs}".rstrip()


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
