"""The worker's link to its inference engine: builds it, syncs and probes weights, frees its memory.

Invariant: when a rollout starts, the engine has the current weights and, unless `rollout.weight_probe` is off, the probe has
verified that its log-probs match the trainer's. An engine that shares the trainer's tensors is only notified of the change;
others copy named tensors (see `full_state`), load a checkpoint, which the first rank of each node writes, or take tensors by
handle (CUDA IPC). If the trainer is another group (`receives`), weights arrive in chunks (see `weight_chunks.py`), and the
trainer judges the probe's samples.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from etude.agents.batch import pad_rows
from etude.chat import ChatTemplate
from etude.errors import EngineError, EtudeError, is_infrastructure, one_line
from etude.inference import (
    ENGINES,
    TOLERANCES,
    AdapterFolder,
    Engine,
    EngineSetup,
    NativeEngine,
    NativeEngineOptions,
    ProbeDraws,
    Router,
    WeightProbe,
    check_takes_images,
)
from etude.metrics import Max, Metrics, add_metrics
from etude.models import load_causal_lm, torch_dtype
from etude.models.loading import DTYPES
from etude.models.lora import add_adapters
from etude.models.named_weights import full_state
from etude.models.vision import Vision
from etude.options import RolloutOptions, TrainOptions
from etude.options.model_path import local_folder, longest_context
from etude.protocol import DataProto
from etude.scratch import Scratch, sweep
from etude.timeouts import called, result_of
from etude.training import PolicyLearner, is_sharded
from etude.workers.role import HERE, Placement
from etude.workers.weight_chunks import (
    BYTES,
    CheckpointFolder,
    checkpoint_chunks,
    folder_config,
    keeps_adapters,
    share_on_node,
    tensors_of,
    weight_bytes,
)

PROBE_TEXTS = ("What is 17 + 25?", "List three colours.", "The capital of France is", "def square(x):\n    return")
R = TypeVar("R")

_MEMORY_FOLDER = Path("/dev/shm")
_PREFIX = "etude-weights-"
_PARTS = frozenset({"weights", "kv_cache"})  # of an engine's memory
_ROOM = 2.5  # required room, in checkpoints: the one in use, the next one, and a margin


def build_engine(
    options: TrainOptions, model: Any, tokenizer: Any, ranks: tuple[int, int] = (0, 1), placement: Placement = HERE
) -> Engine:
    """Builds the engine `rollout.name` on the weights of `model`; if that is None or sharded, on its own weights, initially
    those of `model.path`. `ranks`: (rank of its worker, number of ranks).

    Raises:
        ConfigError: the engine cannot be built from this configuration, or is text-only while the model takes images.
    """
    rollout, path, engine = options.rollout, options.model.path, ENGINES.get(options.rollout.name)
    own_weights = (model is None or is_sharded(model)) and not hasattr(engine, "from_setup")
    dtype = rollout.dtype or options.model.dtype_on(placement.device)
    if own_weights:
        assert path is not None
        trust = options.model.trust_remote_code
        model = load_causal_lm(path, dtype=dtype, device=placement.device, trust_remote_code=trust)
        if placement.trains and options.has_rollout_group and keeps_adapters(options.model):
            add_adapters(model, options.model)
    if model is not None and Vision.of(model.config) is not None:
        check_takes_images(options.rollout.name)
    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    if model is not None and rollout.max_model_len is None:
        longest = min(longest, longest_context(model.config.to_dict()) or longest)
    if not hasattr(engine, "from_setup"):
        given = NativeEngineOptions(
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=longest,
            kv_cache_memory_mb=rollout.kv_cache_memory_mb,
            enable_prefix_caching=rollout.enable_prefix_caching,
            enable_rollout_routing_replay=rollout.enable_rollout_routing_replay,
            dtype=rollout.dtype,
            deterministic=options.trainer.deterministic,
            tokenizer=tokenizer,
            own_weights=own_weights,
        )
        in_process: Engine = engine(model, given)
        return in_process
    setup = EngineSetup(
        model_path=str((path and local_folder(path)) or path),
        tokenizer=tokenizer,
        max_model_len=longest,
        dtype=dtype,
        trust_remote_code=options.model.trust_remote_code,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        seed=rollout.seed,
        server_urls=rollout.server_urls,
        server_command=rollout.server_command,
        rank=ranks[0],
        ranks=ranks[1],
        server_model=rollout.server_model,
        server_api_key_env=rollout.server_api_key_env,
        server_timeout=rollout.server_timeout,
        weight_sync_timeout=rollout.weight_sync_timeout,
        engine_kwargs=rollout.engine_kwargs.get(rollout.name) or {},
        keeps_ids=placement.trains and rollout.top_k > 0,
        shares_gpu=placement.trains and not options.has_rollout_group and placement.device.startswith("cuda"),
    )
    served: Engine = engine.from_setup(setup)
    return served


class WeightSyncError(EtudeError):
    """The engine did not load the trainer's weights."""


class EngineLink:
    """`actor` computes the trainer's log-probs; None if the engine only evaluates or another group sends its weights."""

    def __init__(
        self,
        engine: Engine,
        rollout: RolloutOptions,
        chat: ChatTemplate,
        actor: PolicyLearner | None,
        dtype: str,
        adapter_versions: int = 1,
        streams: bool = False,
        receives: bool = False,
    ) -> None:
        """`dtype`: the trainer's; `adapter_versions`: number of LoRA adapter versions kept on a server; `streams`: whether
        the engine runs while `actor` is trained; `receives`: whether weights come from another group."""
        self.engine, self._rollout, self._actor, self._dtype = engine, rollout, actor, dtype
        self._shares = getattr(engine, "shares_weights", True)
        self._streams, self._kept = streams, Metrics()  # the engine's metrics from before the last probe
        self._receives = receives
        self.is_current = actor is None and not receives  # whether the engine has the current weights
        self.drawn: list[ProbeDraws] = []  # the probe's samples after the last sync
        self._files: CheckpointFolder | None = None
        self._sync_began: float | None = None
        self._asleep: frozenset[str] = frozenset()  # of _PARTS
        self._version = 0
        self._folder: Scratch | None = None
        self._base: Path | None = None  # of a node: its first rank writes there
        self._writes, self._config = True, ""
        self._written: list[Path] = []
        self._numbers = 0  # number of the last received folder
        self._adapter_versions = adapter_versions
        self._probe = self._build_probe(chat, dtype) if (actor or receives) and rollout.weight_probe else None
        # An actor in training cannot provide reference log-probs, nor can a single rank of a sharded one.
        scores = actor is not None and not streams and not is_sharded(actor.model)
        if isinstance(engine, Router) and self._probe is not None:
            engine.admit = self._probe.check if scores else self._compare_returned

    def _build_probe(self, chat: ChatTemplate, dtype: str) -> WeightProbe:
        rollout, actor = self._rollout, self._actor
        tolerance = rollout.weight_probe_tolerance
        # The native engine's tensors are shared, or have the trainer's checksums: only stale caches can be wrong.
        texts, tokens = (PROBE_TEXTS[:1], 4) if isinstance(self.engine, NativeEngine) else (PROBE_TEXTS, 16)
        longest = max((rollout.max_model_len or rollout.prompt_length) - tokens, 1)
        return WeightProbe(
            [chat.initial_ids([{"role": "user", "content": text}])[-longest:] for text in texts],
            None if actor is None else functools.partial(score_rows, actor),
            tolerance=TOLERANCES[DTYPES[rollout.dtype or dtype]] if tolerance is None else tolerance,
            temperature=rollout.temperature,
            tokens=tokens,
        )

    async def ready(self) -> None:
        """Wakes the engine, and probes it if it slept.

        Raises:
            EtudeError: the weights have changed since the last sync.
            WeightMismatch: it lost the weights during sleep.
        """
        if not self.is_current:
            raise EtudeError("the engine does not have the current weights: call update_weights(version) first")
        slept = bool(self._asleep)
        await self._wake()
        if slept and self._probe is not None:
            before = {draws.name: draws for draws in self.drawn}
            for draws in await self._in_time(self._draw, self._version):
                draws.judge_again(before.get(draws.name, draws))

    async def receive(self, data: DataProto) -> None:
        """Takes a chunk of the weights that the next `push` activates.

        Raises:
            EtudeError: a tensor differs from what was sent, or the engine's model does not have it; names it.
        """
        if self._sync_began is None:
            self._sync_began = time.perf_counter()
            await self._wake("weights")
        if isinstance(self.engine, NativeEngine):
            await self.engine.load_weights(*tensors_of(data))
            return
        if self._files is None:
            adapters = self._rollout.weight_transfer == "adapter"
            base = self._base_folder(int(data.meta_info[BYTES]))
            if not adapters:  # no room for a second copy of the model; a replica that comes back waits for this version
                self._forget_versions(0)
            self._numbers += 1
            self._files = CheckpointFolder(base / f"version-{self._numbers}", adapters, self._writes)
        self._config = self._files.receive(data)

    async def push(self, version: int) -> Metrics:
        """Syncs the current weights to the engine as `version`, and probes it.

        Returns:
            `weight_sync/seconds` and, from the probe, `weight_sync/largest_difference` in nats.

        Raises:
            WeightSyncError: the engine did not load them.
            WeightMismatch: it claims to have them but samples from others.
        """
        if self._actor is None and not self._receives:
            return {}
        started, self._sync_began = self._sync_began or time.perf_counter(), None
        await self._wake("weights")
        try:
            source = await self._source(version)
            await self._in_time(self.engine.update_weights, source, version)
            await self._wake()
            metrics = await self._in_time(self._run_probe, version)
        except Exception as error:
            if not is_infrastructure(error):
                raise
            raise WeightSyncError(
                f"the engine '{self._rollout.name}' did not take the weights of version {version}: {one_line(error)}; "
                "fix it and start again: the run resumes from its last checkpoint"
            ) from error
        self.is_current, self._version = True, version
        return {"weight_sync/seconds": Max(time.perf_counter() - started)} | metrics

    async def _in_time(self, function: Callable[..., Awaitable[R]], *args: Any) -> R:
        """Calls what concerns the engine's weights, within the time for it."""
        work = asyncio.ensure_future(called(function, *args))
        return await result_of(work, self._rollout.weight_sync_timeout, key="rollout.weight_sync_timeout")

    async def _run_probe(self, version: int) -> Metrics:
        if self._probe is None:
            return {}
        self.drawn = await self._draw(version)
        if self._receives:
            return {}
        results = [self._probe.judge(draws) for draws in self.drawn]
        return {"weight_sync/largest_difference": Max(max(result.largest for result in results))}

    async def _draw(self, version: int) -> list[ProbeDraws]:
        """Draws the probe's samples from every engine that takes requests."""
        assert self._probe is not None
        probe, self._kept = self._probe, self.metrics()
        if isinstance(self.engine, Router):
            drawn = await self.engine.check_all(lambda engine, name: probe.draw(engine, version, name))
        else:
            drawn = [await probe.draw(self.engine, version)]
        meanwhile = self.engine.metrics()  # read in any case: the probe does not count towards the next rollout
        if self._streams:
            rows = [row for draws in drawn for row in draws.rows]
            prompts, answers = (-float(sum(map(len, part))) for part in zip(*rows)) if rows else (0.0, 0.0)
            probed = {"requests": -float(len(rows)), "prompt_tokens": prompts, "sampled_tokens": answers}
            own = {name: count for name, count in probed.items() if name in meanwhile}
            self._kept = add_metrics([self._kept, meanwhile, own])
        return drawn

    def metrics(self) -> Metrics:
        """Returns the engine's metrics since the last call, without those of the probe."""
        kept, self._kept = self._kept, {}
        return add_metrics([kept, self.engine.metrics()])

    async def _compare_returned(self, engine: Engine, version: int) -> None:
        """Admits a replica that comes back if it draws the same samples as after the last sync.

        Raises:
            WeightMismatch: it does not.
            EngineError: this version has not been probed yet.
        """
        assert self._probe is not None
        known = next((draws for draws in self.drawn if draws.version == version), None)
        if known is None:
            raise EngineError(f"version {version} of the weights has not been probed yet")
        (await self._probe.draw(engine, version, "the server")).judge_again(known)

    async def _source(self, version: int) -> Any:
        if self._shares:
            return None
        if self._receives:
            if isinstance(self.engine, NativeEngine):
                return ()
            received, self._files = self._files, None
            if received is None:
                raise EtudeError("the engine was sent no weights")
            received.finish(self._config)
            return self._written_source(received.folder)
        assert self._actor is not None
        model, dtype = self._actor.model, torch_dtype(self._dtype)
        if isinstance(self.engine, NativeEngine):
            return full_state(model, dtype=torch_dtype(self._rollout.dtype) if self._rollout.dtype else dtype)
        if self._rollout.weight_transfer == "cuda_ipc":
            return dict(tensor for chunk in checkpoint_chunks(model, dtype, False) for tensor in chunk)
        adapters = self._rollout.weight_transfer == "adapter"
        folder = self._base_folder(weight_bytes(model)) / f"version-{version}"
        files = CheckpointFolder(folder, adapters, self._writes)
        for chunk in checkpoint_chunks(model, dtype, adapters):
            files.write(chunk)
        files.finish(folder_config(model, adapters))
        return self._written_source(folder)

    def _written_source(self, folder: Path) -> Path | AdapterFolder:
        """Returns a folder in the form that the engine takes, and deletes earlier ones, except adapter versions in use. This
        one is kept for a replica that comes back."""
        adapters = self._rollout.weight_transfer == "adapter"
        self._written = [*(other for other in self._written if other != folder), folder]
        keep = self._adapter_versions if adapters else 1
        self._forget_versions(keep)
        return AdapterFolder(str(folder.absolute()), keep) if adapters else folder

    def _forget_versions(self, keep: int) -> None:
        while len(self._written) > keep:
            folder = self._written.pop(0)
            if self._writes:
                shutil.rmtree(folder, ignore_errors=True)

    def _base_folder(self, size: int) -> Path:
        if self._base is None:
            self._base, self._writes = share_on_node(functools.partial(self._make_folder, size))
        return self._base

    def _make_folder(self, size: int) -> Path:
        parent = self._rollout.weight_sync_dir
        if parent is None:
            sweep(_MEMORY_FOLDER, _PREFIX)  # before free space is measured
            parent = _memory_folder(int(_ROOM * size))
        else:
            Path(parent).mkdir(parents=True, exist_ok=True)
        self._folder = Scratch.make(_PREFIX, parent)
        weakref.finalize(self, self._folder.remove)
        return self._folder.folder

    async def rest(self) -> None:
        """Called after a rollout: frees the engine's memory if `rollout.free_cache_engine` is set."""
        if self._rollout.free_cache_engine and not self._asleep and await self._call_engine("sleep"):
            self._asleep = _PARTS

    async def _wake(self, *parts: str) -> None:
        """Wakes these parts of the engine, by default all that sleep: the KV cache only after a weight sync, whose tensors
        need the memory."""
        if waking := self._asleep.intersection(parts or _PARTS):
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # what the update held is the engine's now
            await self._call_engine("wake", *(sorted(waking) if waking != _PARTS else ()))
            self._asleep -= waking

    async def _call_engine(self, what: str, *given: str) -> bool:
        """Calls the engine's `sleep` or `wake`; returns whether it supports them.

        Raises:
            EtudeError: the call failed.
        """
        if not hasattr(self.engine, what):
            return False
        try:
            await self._in_time(getattr(self.engine, what), *given)
        except Exception as error:
            if not is_infrastructure(error):
                raise
            raise EtudeError(f"the engine '{self._rollout.name}' did not {what}: {one_line(error)}") from error
        return True


def _memory_folder(size: int) -> str | None:
    """The in-memory folder if it has room for `size` bytes; None: the temporary directory."""
    if not os.access(_MEMORY_FOLDER, os.W_OK) or shutil.disk_usage(_MEMORY_FOLDER).free < size:
        return None
    return str(_MEMORY_FOLDER)


def score_rows(
    actor: PolicyLearner, rows: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float
) -> list[list[float]]:
    """Computes the actor's log-probs of the responses in (prompt, response) pairs."""
    prompts, responses = zip(*rows)
    mask = pad_rows([[1] * len(ids) for ids in responses], 0)
    attention = torch.cat([pad_rows([[1] * len(ids) for ids in prompts], 0, left=True), mask], dim=1)
    ids = torch.cat([pad_rows(prompts, 0, left=True), pad_rows(responses, 0)], dim=1)
    batch = DataProto.from_single_dict({"input_ids": ids, "attention_mask": attention, "response_mask": mask})
    values = actor.log_probs(batch, temperature, alone=True)[0].tolist()
    return [row[: len(response)] for row, response in zip(values, responses)]
