"""The scripted engine: replays given token ids. For tests, and for dry runs of an agent without a model.

Invariant: the n-th request of a trajectory returns the n-th script entry, cut at `max_tokens`; log-probs are 0.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from etude.errors import EngineError
from etude.inference.types import ENGINES, SamplingParams, TokenOutput
from etude.metrics import Metrics

Script = Callable[[str, list[int], int], "list[int] | Exception | Awaitable[list[int]]"]


@ENGINES.register("scripted")
class ScriptedEngine:
    """`script(request_id, prompt_ids, turn)` returns the ids of a turn, an awaitable of them, or an exception to raise;
    `latency`: seconds before each answer."""

    def __init__(self, script: Script, latency: float = 0.0) -> None:
        self._script, self._latency = script, latency
        self._turns: dict[str, int] = defaultdict(int)
        self._version = 0
        self._tokens = 0
        self.opened: list[str] = []
        self.closed: list[str] = []

    def open(self, request_ids: Sequence[str]) -> None:
        """Records the trajectories in `opened`."""
        self.opened += request_ids

    def close(self, request_id: str) -> None:
        """Records the trajectory in `closed`."""
        self.closed.append(request_id)
        self._turns.pop(request_id, None)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        *,
        images: Sequence[Any] | None = None,
    ) -> TokenOutput:
        """Returns the next entry of the script.

        Raises:
            EngineError: the script returned an exception.
        """
        params = SamplingParams.of(sampling_params)
        await asyncio.sleep(self._latency)
        turn = self._turns[request_id]
        self._turns[request_id] += 1
        ids = self._script(request_id, list(prompt_ids), turn)
        if inspect.isawaitable(ids):
            ids = await ids
        if isinstance(ids, Exception):
            raise EngineError(f"scripted failure: {ids}") from ids
        reason = "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        self._tokens += len(ids)
        return TokenOutput(ids, [0.0] * len(ids), reason, [self._version] * len(ids))

    async def abort(self, request_id: str) -> None:
        """Does nothing: the script decides how each request ends."""

    async def pause(self) -> None:
        """Does nothing."""

    async def resume(self) -> None:
        """Does nothing."""

    async def update_weights(self, source: Any, version: int) -> None:
        """Sets the version reported with tokens; `source` is ignored."""
        self._version = version

    def metrics(self) -> Metrics:
        """Returns the number of tokens since the last call."""
        tokens, self._tokens = self._tokens, 0
        return {"sampled_tokens": float(tokens)}
