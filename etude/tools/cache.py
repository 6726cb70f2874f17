"""`ResultCache`: caches and shares the answers of a tool whose `execute` is pure.

Pure means: the answer (text, media, step reward and metrics) depends on the arguments, the row's `create_kwargs` and
`execute_kwargs` and the tool's configuration alone, and executing changes nothing. Switching the cache on declares that.

Invariant: an answer is served only for an equal key; errors are never cached; at most one execution per key runs in this
event loop at a time, in the trajectory that asked first. If that trajectory is cancelled, the next one waiting executes
instead, with its own instance: no call outlives its trajectory.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from etude.tools.options import CachePolicy
from etude.tools.outcome import Source, ToolResult
from etude.tools.store import ResultStore
from etude.tools.wire import result_from_json, result_to_json

_MAX_CHARACTERS = 2**28


class ResultCache:
    """Keeps the last `max_entries` answers used in memory (256 million characters at most), and those of `path` on disk."""

    def __init__(self, policy: CachePolicy) -> None:
        """Opens the file, if there is one.

        Raises:
            ConfigError: it cannot be opened.
        """
        self._policy = policy
        self._kept: OrderedDict[str, tuple[float, ToolResult]] = OrderedDict()
        self._characters = 0
        self._flights: dict[tuple[int, str], asyncio.Future[ToolResult]] = {}
        self._store = None if policy.path is None else ResultStore(policy.path, policy.max_entries, policy.ttl)

    async def answer(self, key: str, execute: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """The answer for `key`: cached, shared with a running call, or from `execute()`.

        Raises:
            Exception: what `execute` raised, here or in the call that was shared.
        """
        loop = asyncio.get_running_loop()
        place = (id(loop), key)
        while True:
            known = self._recall(key) or await self._recall_from_disk(key)
            if known is not None:
                return known
            flight = self._flights.get(place)
            if flight is None:
                break
            await asyncio.wait({flight})
            if not flight.cancelled():
                return _copy(flight.result(), Source.SHARED)
        flight = self._flights[place] = loop.create_future()
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
            del self._flights[place]
        await self._keep_on_disk(key, answer)
        return answer

    def _recall(self, key: str) -> ToolResult | None:
        entry = self._kept.get(key)
        if entry is None:
            return None
        if self._policy.ttl is not None and time.monotonic() - entry[0] > self._policy.ttl:
            self._forget(key)
            return None
        self._kept.move_to_end(key)
        return _copy(entry[1], Source.CACHE)

    async def _recall_from_disk(self, key: str) -> ToolResult | None:
        record = None if self._store is None else await self._store.get(key)
        if record is None:
            return None
        try:
            return result_from_json(record, Source.CACHE)  # not cached in memory: that would reset its age
        except (KeyError, TypeError, ValueError, OSError):
            return None

    def _keep(self, key: str, answer: ToolResult) -> None:
        self._forget(key)
        self._kept[key] = (time.monotonic(), answer)
        self._characters += _length(answer)
        while len(self._kept) > self._policy.max_entries or self._characters > _MAX_CHARACTERS:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: str) -> None:
        entry = self._kept.pop(key, None)
        if entry is not None:
            self._characters -= _length(entry[1])

    async def _keep_on_disk(self, key: str, answer: ToolResult) -> None:
        if self._store is None or answer.error is not None:
            return
        try:
            record = result_to_json(answer)
        except (TypeError, ValueError):  # media that JSON and PNG cannot represent stay in memory
            return
        await self._store.put(key, record)


def _length(answer: ToolResult) -> int:
    return len(answer.response.text or "")


def _copy(answer: ToolResult, source: Source) -> ToolResult:
    """A copy of `answer` for another trajectory, which may modify it."""
    response = answer.response.model_copy(
        update={kind: list(media) for kind in ("image", "video") if (media := getattr(answer.response, kind))}
    )
    return replace(answer, response=response, metrics=dict(answer.metrics), source=source)
