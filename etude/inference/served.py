"""`ServedEngine`: the base class of engines whose model runs elsewhere, in another process or behind HTTP.

It tracks requests in flight; subclasses define how a request is sent, how weights are loaded, and how the engine is paused.
Such an engine has its own weights (`shares_weights` is False): `update_weights` takes the folder of a Hugging Face
checkpoint that the engine's process can read.

Invariant: a trajectory has at most one request in flight; once `generate` has returned, raised or been cancelled, or the
trajectory was closed, nothing more is computed for it. `validate_answer` checks everything that training relies on: one
finite log-prob per token, none positive beyond rounding; with `keeps_ids`, the ids that top-k and top-p left of each; a
turn that ended with "stop" ends with a stop id of the request, or at one of its stop strings. An answer that violates this
raises `EngineError`: no token of it reaches a trajectory.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.errors import ConfigError, EngineError, GrammarError
from etude.inference.types import SamplingParams, TokenOutput
from etude.metrics import Metrics
from etude.timeouts import settle
from etude.trajectory import Kept

_ROUNDING = 1e-3  # a probability of 1 computed in bfloat16 may come out slightly larger


@dataclass(frozen=True)
class AdapterFolder:
    """A LoRA adapter in `peft`'s format (absolute path), applied to the weights that the engine started with; the engine
    keeps the last `versions` adapters."""

    folder: str
    versions: int


class ServedEngine(ABC):
    """Base class; `max_model_len`: the longest context in tokens; `keeps_ids`: see `EngineSetup`."""

    shares_weights = False
    text_only = True
    kept_ids_need_top_k = True

    def __init__(self, max_model_len: int, keeps_ids: bool = False) -> None:
        self._limit, self._keeps_ids = max_model_len, keeps_ids
        self._adapters: list[str] = []  # names of the loaded LoRA adapters, the current one last
        self._run = secrets.token_hex(4)  # part of these names: a server may still have another run's adapters
        self._calls: dict[str, tuple[str, asyncio.Task[TokenOutput]]] = {}  # in flight: name, task
        self._numbers = itertools.count()
        self._version = 0
        self._paused = False
        self._counters = _fresh_counters()

    def open(self, request_ids: Sequence[str]) -> None:  # noqa: B027
        """Does nothing: servers reuse a trajectory's earlier turns through their prefix cache."""

    def close(self, request_id: str) -> None:
        """Cancels the trajectory's request, if one is in flight; its `generate` returns "aborted"."""
        if call := self._calls.get(request_id):
            call[1].cancel()

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
        if params.grammar is not None:
            raise GrammarError(
                f"the {type(self).__name__} takes no grammar: it needs actor_rollout_ref.rollout.name=native"
            )
        if request_id in self._calls:
            raise ConfigError(f"trajectory '{request_id}' already has a request under way")
        limit = min(params.max_tokens, self._limit - len(prompt_ids))
        if not prompt_ids or limit < 1:
            return TokenOutput([], [], "length", [])
        name = f"{request_id}#{next(self._numbers)}"
        task = asyncio.ensure_future(self._ask(name, list(prompt_ids), replace(params, max_tokens=limit)))
        self._calls[request_id] = (name, task)
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
        """Aborts the trajectory's request: `generate` returns the tokens sampled so far, with stop reason "aborted"."""
        if call := self._calls.get(request_id):
            await self._abort(call[0])

    async def pause(self) -> None:
        """See `etude.inference.Engine.pause`."""
        await self._pause()
        self._paused = True

    async def resume(self) -> None:
        """See `etude.inference.Engine.resume`."""
        await self._resume()
        self._paused = False

    @property
    def adapter(self) -> str | None:
        """The name of the LoRA adapter that requests use; None: no adapter."""
        return self._adapters[-1] if self._adapters else None

    async def update_weights(self, source: Any, version: int) -> None:
        """Loads new weights between two tokens; the KV cache of requests in flight is recomputed.

        Args:
            source: a checkpoint's folder, readable by the engine's process under the same path; or an `AdapterFolder`, whose
                adapter new requests use. Requests in flight then keep their adapter, with which their cache was computed.

        Raises:
            EngineError: the engine did not load them.
            ConfigError: `source` is not a checkpoint folder.
        """
        if isinstance(source, AdapterFolder):
            name = f"etude-{self._run}-{version}-{next(self._numbers)}"
            await self._load_adapter(name, source.folder)
            self._adapters.append(name)
            self._version = version
            while len(self._adapters) > source.versions:
                with suppress(EngineError):  # a restarted server has none of the old adapters
                    await self._unload_adapter(self._adapters.pop(0))
            return
        if not self._paused:
            await self._pause()
        try:
            await self._load(source, version)
            self._version = version
        finally:
            if not self._paused:
                await self._resume()

    def metrics(self) -> Metrics:
        """Returns the counts since the last call: requests, prompt tokens, sampled tokens."""
        counters, self._counters = self._counters, _fresh_counters()
        return {**counters}

    @abstractmethod
    async def _ask(self, name: str, prompt: list[int], params: SamplingParams) -> TokenOutput:
        """Sends one request under the unique `name`; raises EngineError if it fails."""

    async def _abort(self, name: str) -> None:  # noqa: B027
        """Aborts the request `name`, so that `_ask` returns the tokens sampled so far."""

    @abstractmethod
    async def check(self) -> None:
        """Raises EngineError if the engine cannot take requests."""

    async def _pause(self) -> None:  # noqa: B027
        """Stops generation between two tokens; requests in flight stay."""

    async def _resume(self) -> None:  # noqa: B027
        """Resumes generation."""

    @abstractmethod
    async def _load(self, source: Any, version: int) -> None:
        """Loads new weights while paused and drops caches of the old ones; raises EngineError if it fails."""

    async def _load_adapter(self, name: str, folder: str) -> None:
        """Loads the adapter in `folder`, for requests to use by `name`; raises EngineError if it fails."""
        raise ConfigError(f"the {type(self).__name__} takes no adapters: use rollout.weight_transfer=folder")

    async def _unload_adapter(self, name: str) -> None:  # noqa: B027
        """Unloads the adapter; requests that still use it may end."""

    async def sleep(self) -> None:  # noqa: B027  (not every engine can release memory)
        """Releases device memory until `wake`, if the engine can."""

    async def wake(self, *parts: str) -> None:  # noqa: B027
        """Reallocates what `sleep` released: of "weights" and "kv_cache" those in `parts`; none: both."""

    async def shutdown(self) -> None:  # noqa: B027
        """Ends the processes that the engine started."""


def checkpoint_folder(source: Any, engine: str) -> str:
    """Returns `source` as an absolute path, for another process.

    Raises:
        ConfigError: it is not a checkpoint folder.
    """
    if not isinstance(source, str | Path) or not (Path(source) / "config.json").is_file():
        raise ConfigError(f"the {engine} engine takes weights from a checkpoint's folder, not from {source!r:.80}")
    return str(Path(source).absolute())


def _fresh_counters() -> dict[str, float]:
    return dict.fromkeys(("requests", "prompt_tokens", "sampled_tokens"), 0.0)


@dataclass(frozen=True)
class Answer:
    """An engine's answer before validation; `ending` is one of stop, length, abort, as servers call them.

    `versions`: spans (version, start, end) over the tokens, or None if the engine reports none. `kept_ids`: per token those
    that top-k and top-p left, or None.
    """

    token_ids: Any
    log_probs: Any
    ending: Any
    versions: Sequence[tuple[int, int, int]] | None = None
    kept_ids: Any = None


def version_spans(spans: Any) -> list[tuple[int, int, int]]:
    """Parses a server's spans {version, start, end}; leaves out versions that are not numbers ("default", before the first
    update)."""
    named = [(str(span["version"]), span["start"], span["end"]) for span in spans or ()]
    return [(int(version), start, end) for version, start, end in named if version.isdecimal()]


def validate_answer(
    answer: Answer, params: SamplingParams, version: int, source: str, keeps_ids: bool = False
) -> TokenOutput:
    """Validates `answer` and returns it as a `TokenOutput`; log-probs of greedy decoding are set to 0, those of a point
    mass.

    Args:
        version: weight version of tokens that the answer's spans do not cover.
        source: named in errors.
        keeps_ids: whether an answer to a request with top-k must have its `kept_ids`.

    Raises:
        EngineError: the answer is invalid and cannot be trained on; says why.
    """
    ids, log_probs = answer.token_ids, answer.log_probs
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise EngineError(f"{source}: the response has no list of token ids")
    if params.temperature == 0:
        log_probs = [0.0] * len(ids)
    if not isinstance(log_probs, list) or len(log_probs) != len(ids):
        count = len(log_probs) if isinstance(log_probs, list) else "no"
        raise EngineError(f"{source}: {count} log-probs for {len(ids)} tokens")
    for place, value in enumerate(log_probs):
        if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value):
            raise EngineError(f"{source}: the log-prob of token {place} is not a finite number: {value!r:.40}")
        if value > _ROUNDING:
            raise EngineError(f"{source}: the log-prob of token {place} is positive: {value}")
    if len(ids) > params.max_tokens:
        raise EngineError(f"{source}: {len(ids)} tokens, though {params.max_tokens} were asked for at most")
    versions = [version] * len(ids)
    for named, start, end in answer.versions or ():
        for place in range(max(start, 0), min(end, len(ids))):
            versions[place] = named
    return TokenOutput(
        ids,
        [float(value) for value in log_probs],
        _reason(answer.ending, ids, params, source),
        versions,
        kept_ids=_kept_ids(answer, ids, source) if keeps_ids and restricts(params) else None,
    )


def restricts(params: SamplingParams) -> bool:
    """Whether top-k restricts what is sampled, so that servers return the ids that it and top-p kept."""
    return params.temperature > 0 and params.top_k > 0


def _kept_ids(answer: Answer, ids: list[int], source: str) -> list[Kept | None]:
    kept = answer.kept_ids
    if not isinstance(kept, list) or len(kept) != len(ids):
        raise EngineError(
            f"{source}: the response lacks the tokens that top-k and top-p kept, which training with them needs: vLLM "
            "returns them with --return-sampling-mask and --enable-scale-out (docs/engines.md)"
        )
    for place, (token, each) in enumerate(zip(ids, kept)):
        if not isinstance(each, list) or not all(type(one) is int and one >= 0 for one in each) or token not in each:
            raise EngineError(f"{source}: token {place} is not among those that top-k and top-p kept: {each!r:.40}")
    return [array("i", sorted(each)) for each in kept]


def _reason(ending: Any, ids: list[int], params: SamplingParams, source: str) -> str:
    if ending == "abort":
        return "aborted"
    if ids and (ids[-1] in params.stop_token_ids or (params.stop and ending == "stop")):
        return "stop"
    if ending != "length":
        last = f"token {ids[-1]}" if ids else "no token"
        raise EngineError(f"{source}: ended as {ending!r:.40} after {last}, which is no stop id of the request")
    return "length"
