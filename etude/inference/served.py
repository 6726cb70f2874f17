"""`ServedEngine`: the common part of engines whose model runs elsewhere, in another process or behind HTTP.

It keeps track of requests in flight, and leaves to subclasses how one is sent, how weights arrive, and how the engine is
paused. Such an engine has its own weights (`shares_weights` is False): `update_weights` takes the folder of a Hugging Face
checkpoint that its process can read.

Invariant: a trajectory has at most one request in flight; once `generate` has returned, raised or been cancelled, or the
trajectory was closed, nothing is computed for it any more.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.bounded import settle
from etude.errors import ConfigError
from etude.inference.types import SamplingParams, TokenOutput
from etude.metrics import Metrics


@dataclass(frozen=True)
class _Call:
    name: str
    task: asyncio.Task[TokenOutput]


class ServedEngine(ABC):
    """`max_model_len`: the longest context in tokens."""

    shares_weights = False
    text_only = True

    def __init__(self, max_model_len: int) -> None:
        self._limit = max_model_len
        self._calls: dict[str, _Call] = {}
        self._numbers = itertools.count()
        self._version = 0
        self._paused = False
        self._counters = _fresh_counters()

    def open(self, request_ids: Sequence[str]) -> None:  # noqa: B027
        """Does nothing: servers find a trajectory's earlier turns in their prefix cache."""

    def close(self, request_id: str) -> None:
        """Cancels the trajectory's request, if one is in flight; its `generate` returns "aborted"."""
        if call := self._calls.get(request_id):
            call.task.cancel()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        *,
        images: Sequence[Any] | None = None,
    ) -> TokenOutput:
        """See `etude.inference.Engine.generate`."""
        if images:
            raise ConfigError(
                f"the {type(self).__name__} takes text only: rows with images need actor_rollout_ref.rollout.name=native"
            )
        params = SamplingParams.of(sampling_params)
        if request_id in self._calls:
            raise ConfigError(f"trajectory '{request_id}' already has a request under way")
        limit = min(params.max_tokens, self._limit - len(prompt_ids))
        if not prompt_ids or limit < 1:
            return TokenOutput([], [], "length", [])
        name = f"{request_id}#{next(self._numbers)}"
        task = asyncio.ensure_future(self._ask(name, list(prompt_ids), replace(params, max_tokens=limit)))
        self._calls[request_id] = _Call(name, task)
        try:
            await asyncio.wait({task})
        finally:
            del self._calls[request_id]
            await settle({task})
        if task.cancelled():  # by `close`
            return TokenOutput([], [], "aborted", [])
        output = task.result()
        self._counters["requests"] += 1
        self._counters["prompt_tokens"] += len(prompt_ids)
        self._counters["sampled_tokens"] += len(output.token_ids)
        return output

    async def abort(self, request_id: str) -> None:
        """Ends the trajectory's request; its `generate` returns what was sampled, with stop reason "aborted"."""
        if call := self._calls.get(request_id):
            await self._abort(call.name)

    async def pause(self) -> None:
        """See `etude.inference.Engine.pause`."""
        await self._pause()
        self._paused = True

    async def resume(self) -> None:
        """See `etude.inference.Engine.resume`."""
        await self._resume()
        self._paused = False

    async def update_weights(self, source: Any, version: int) -> None:
        """Loads new weights between two tokens; what requests in flight had computed with the old ones is recomputed.

        Args:
            source: a checkpoint's folder, readable by the engine's process under the same path.

        Raises:
            EngineError: the engine did not take them.
            ConfigError: `source` is not such a folder.
        """
        if not self._paused:
            await self._pause()
        try:
            await self._load(source, version)
            self._version = version
        finally:
            if not self._paused:
                await self._resume()

    def metrics(self) -> Metrics:
        """Counts since the last call: requests, prompt tokens, sampled tokens."""
        counters, self._counters = self._counters, _fresh_counters()
        return {**counters}

    @abstractmethod
    async def _ask(self, name: str, prompt: list[int], params: SamplingParams) -> TokenOutput:
        """One request under the unique `name`; EngineError if it fails."""

    @abstractmethod
    async def _abort(self, name: str) -> None:
        """Ends the request `name`, so that `_ask` returns what it has."""

    @abstractmethod
    async def check(self) -> None:
        """Raises EngineError if the engine cannot take requests."""

    @abstractmethod
    async def _pause(self) -> None:
        """Stops between two tokens; requests stay."""

    @abstractmethod
    async def _resume(self) -> None:
        """Resumes them."""

    @abstractmethod
    async def _load(self, source: Any, version: int) -> None:
        """Takes new weights while paused, and drops what was computed with the old ones; EngineError if it fails."""

    async def sleep(self) -> None:  # noqa: B027  (an engine may have nothing to give back)
        """Releases device memory until `wake`, if the engine can."""

    async def wake(self) -> None:  # noqa: B027
        """Reallocates what `sleep` released."""

    async def shutdown(self) -> None:  # noqa: B027
        """Ends the processes that the engine itself started."""


def checkpoint_folder(source: Any, engine: str) -> str:
    """`source` as a path for another process.

    Raises:
        ConfigError: it is not a checkpoint folder.
    """
    if not isinstance(source, str | Path) or not (Path(source) / "config.json").is_file():
        raise ConfigError(f"the {engine} engine takes weights from a checkpoint's folder, not from {source!r:.80}")
    return str(Path(source).absolute())


def _fresh_counters() -> dict[str, float]:
    return dict.fromkeys(("requests", "prompt_tokens", "sampled_tokens"), 0.0)
