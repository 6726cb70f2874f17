"""The native engine: continuous batching over a Hugging Face causal LM, in this process, on CPU or one GPU.

Requests join and leave the batch between decode steps. A trajectory keeps its KV cache from turn to turn, so a turn
prefills only its new tokens, and a prompt is computed once for all trajectories that start with it. The scheduler decides
what a step computes, the cache where keys and values are stored. The model is the trainer's own object: a weight update
copies nothing and only clears caches (unless `dtype` asks for a copy in another precision). With `own_weights` the engine
has a separate model, and an update copies named tensors into it.

Deterministic mode. Results depend on which rows share a step, since a matrix product may round differently at another
batch size. So which rows share a step must not depend on timing: requests are admitted only at *scheduling points*
(every `admit_every` steps, or when no row is left to decode), in row order, and at such a point the engine first waits
until every open trajectory has either requested its next turn or been closed. Between points, tools run while other
trajectories decode. A slow tool delays a scheduling point but never changes a token. Since a resumed run starts with empty
caches, so does every batch: no prefix outlives the trajectories that were open together.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from etude.errors import ConfigError, EngineError, EtudeError, GrammarError, one_line
from etude.inference.grammar import GrammarCompiler, Matcher
from etude.inference.kv_cache import KVShape, PrefixStore, SlabCache, most_tokens
from etude.inference.layout import StepLayout
from etude.inference.metrics import EngineMetrics
from etude.inference.prepacked import PrepackedLinears
from etude.inference.row_caches import RowCaches
from etude.inference.sampling import sample
from etude.inference.scheduler import Request, Scheduler, SequenceState, StepPlan
from etude.inference.step_threads import StepThreads
from etude.inference.stop_strings import StopStrings
from etude.inference.types import ENGINES, SamplingParams, TokenOutput
from etude.inference.vision import StepImages
from etude.metrics import Metrics
from etude.models.experts import record_experts, routers
from etude.models.image_positions import ImagePositions
from etude.models.loading import torch_dtype
from etude.models.named_weights import Chunk, WeightCopy, weight_checksums
from etude.models.packable import enable_packing, use_packing
from etude.models.packed import logits_of, packed_hidden
from etude.models.vision import Vision, no_images_error
from etude.options.model_path import longest_context
from etude.trajectory import Kept


@dataclass(frozen=True)
class NativeEngineOptions:
    """Field names are keys of `actor_rollout_ref.rollout`, except `deterministic`, `admit_every` and `tokenizer`.

    Attributes:
        max_num_seqs: trajectories decoded together.
        max_num_batched_tokens: maximum tokens per step; every decoding row gets its one token even beyond that.
        max_model_len: longest context in tokens; None: the model's limit, or less if the memory holds less.
        kv_cache_memory_mb: MiB for keys and values; None: no limit.
        enable_prefix_caching: whether unused prompts stay cached; without a memory limit, at most `max_num_seqs` of them.
        dtype: precision to sample in; None: the model's.
        deterministic: see the module's docstring.
        admit_every: decode steps between scheduling points of the deterministic mode.
        tokenizer: decodes sampled ids to detect stop strings; its vocabulary is what grammars are compiled for.
        enable_rollout_routing_replay: whether outputs include the experts that each token was routed to.
        own_weights: the model is not shared with the trainer: `update_weights` takes chunks of named tensors.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    kv_cache_memory_mb: int | None = None
    enable_prefix_caching: bool = True
    dtype: str | None = None
    deterministic: bool = False
    admit_every: int = 8
    tokenizer: Any = None
    enable_rollout_routing_replay: bool = False
    own_weights: bool = False


_Draw: TypeAlias = tuple[int, float, "Kept | None"] | GrammarError
"""A token id, its log-prob, and the ids that it was sampled from (see `sample`); an error if its grammar allowed none."""


@dataclass(frozen=True, eq=False)
class _Step:
    """A running step and the tokens it will draw. `requests`: its rows' requests when it was planned, since a request may be
    dropped while the step runs, and its row may even get another."""

    plan: StepPlan
    requests: dict[SequenceState, Request | None]
    drawn: Future[list[_Draw]]


@ENGINES.register("native")
class NativeEngine:
    """Implements `etude.inference.Engine`; see the module's docstring."""

    returns_kept_ids = returns_heads = True

    def __init__(self, model: Any, options: NativeEngineOptions | None = None) -> None:
        """Raises ConfigError if the architecture is not supported (see `etude.models.packable`), or if the KV cache memory
        is too small for a context of the requested length."""
        self.options = options or NativeEngineOptions()
        self.shares_weights = not self.options.own_weights
        self._source = self._model = model
        packs = use_packing(model)
        if packs:
            enable_packing(model, cached=True)
        dtype = model.dtype if self.options.dtype is None else torch_dtype(self.options.dtype)
        if dtype != model.dtype:
            self._model = _copy_in_dtype(model, dtype)
        if self.options.own_weights:
            self._source = self._model.requires_grad_(False)
        self._prepacked = PrepackedLinears(self._model)
        self._caches = None if packs else RowCaches.of(self._model)
        vision = Vision.of(self._model.config)
        self._images = None
        if vision is not None:
            self._images = StepImages(self._model, vision, self.options.max_num_batched_tokens)
        if self.options.enable_rollout_routing_replay and not routers(model):
            kind = model.config.model_type
            raise ConfigError(
                f"rollout.enable_rollout_routing_replay: a model of type '{kind}' has no routers to replay"
            )
        self._shape = KVShape.of(self._model, self.options.enable_rollout_routing_replay)
        self._threads = StepThreads(self._model, self._shape.device)
        megabytes = self.options.kv_cache_memory_mb
        self._budget = None if megabytes is None else megabytes << 20
        self._limit = self._longest()
        self._vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        tokenizer = self.options.tokenizer
        self._grammars = None if tokenizer is None else GrammarCompiler(tokenizer, self._vocabulary)
        self._compiling: set[str] = set()
        self._version = 0
        self._admissions = 0
        self._paused = self._paused_before = False
        self._incoming: WeightCopy | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Handle | None = None
        self._stepping: _Step | None = None
        self._steps_since_point = 0
        self.steps_done = self.tokens_done = 0
        self._metrics = EngineMetrics()
        self._scheduler = self._new_scheduler()

    def _longest(self) -> int:
        positions = longest_context(self._model.config.to_dict()) or sys.maxsize
        fits = positions if self._budget is None else most_tokens(self._shape, self._budget)
        wanted = self.options.max_model_len
        if wanted is None:
            wanted = min(positions, fits)
        if wanted > positions:
            raise ConfigError(f"max_model_len {wanted} is more than the model's {positions} positions")
        if wanted > fits or wanted < 1:
            raise ConfigError(
                f"rollout.kv_cache_memory_mb={self.options.kv_cache_memory_mb} holds a context of at most {fits} tokens, "
                f"less than max_model_len {max(wanted, 1)}: a token takes {self._shape.token_bytes} bytes"
            )
        return wanted

    def _new_scheduler(self) -> Scheduler:
        cache = SlabCache(self._shape, self._budget)
        most_unused = None if self._budget is not None else self.options.max_num_seqs
        if not self.options.enable_prefix_caching:
            most_unused = 0
        return Scheduler(
            cache,
            PrefixStore(cache, most_unused=most_unused),
            max_num_seqs=self.options.max_num_seqs,
            max_num_batched_tokens=self.options.max_num_batched_tokens,
        )

    @property
    def _rows(self) -> dict[str, SequenceState]:
        return self._scheduler.rows

    # -- the interface -------------------------------------------------------------------------------------------

    def open(self, request_ids: Sequence[str]) -> None:
        """Announces trajectories, in row order.

        Trajectories announced one by one between two scheduling points are ordered by id, since the order of the calls
        depends on timing.
        """
        if self.options.deterministic and not self._rows:
            self._scheduler.reclaim()
            self._scheduler.prefixes.clear_unused()
        for place, request_id in enumerate(request_ids):
            if request_id in self._rows:
                raise ConfigError(f"trajectory '{request_id}' is already open")
            self._rows[request_id] = SequenceState(rank=(self._admissions, place, request_id))

    def close(self, request_id: str) -> None:
        """Aborts the trajectory's request and frees its cache; does nothing if it is not open."""
        self._compiling.discard(request_id)
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        self._drop_request(row, "aborted")
        self._scheduler.close(row)
        if not self._rows and self._stepping is None:  # the trainer needs the memory next
            self._scheduler.reclaim()
            self._prepacked.release()
        self._notify()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        *,
        images: Sequence[Any] | None = None,
    ) -> TokenOutput:
        """Samples a continuation; prefills only the part of `prompt_ids` that is not cached.

        Raises:
            EngineError: a step failed, for instance because it ran out of memory.
            EtudeError: a token id is outside the model's vocabulary.
            ConfigError: the model does not support images, the trajectory already has a request, or a grammar or stop
                strings are given and the engine has no tokenizer.
            GrammarError: the grammar is invalid or not supported, or exceeded a limit while sampling.
            DataError: the images do not match their placeholders in `prompt_ids`.
        """
        if images and self._images is None:
            raise no_images_error(self._model.config)
        params = SamplingParams.of(sampling_params)
        matcher = None
        if params.grammar is not None:
            self._compiling.add(request_id)
            try:
                params, matcher = await self._matcher(params)
                if request_id not in self._compiling:  # aborted or closed meanwhile
                    return TokenOutput([], [], "aborted", [])
            finally:
                self._compiling.discard(request_id)
        known = self._rows.get(request_id)
        if known is not None and known.request is not None:
            raise ConfigError(f"trajectory '{request_id}' already has a request under way")
        limit = min(params.max_tokens, self._limit - len(prompt_ids))
        if not prompt_ids or limit < 1:
            return TokenOutput([], [], "length", [])
        if max(prompt_ids) >= self._vocabulary:  # it would fail the step, and with it every other request
            raise EtudeError(f"token id {max(prompt_ids)} is beyond the model's vocabulary of {self._vocabulary}")
        placed = None if self._images is None else ImagePositions.of(prompt_ids, images or (), self._images.vision)
        prompt = list(prompt_ids) if placed is None else placed.keyed(prompt_ids)
        stops, tokenizer = None, self.options.tokenizer
        if params.stop:
            if tokenizer is None:
                raise ConfigError(
                    "stop texts need a tokenizer: this engine was made without NativeEngineOptions.tokenizer"
                )
            stops = StopStrings(tokenizer, params.stop)
        if known is None:  # only after validation: a rejected request must not leave a trajectory open
            self.open([request_id])
        row = self._rows[request_id]
        self._use_running_loop()
        future = asyncio.get_running_loop().create_future()
        request = row.request = Request(prompt, params, limit, future, placed, stops, matcher)
        self._scheduler.queue.append(row)
        if self._model.training:
            self._model.eval()
        self._notify()
        try:
            return await request.future
        finally:
            if row.request is request:  # the caller was cancelled
                self._drop_request(row, "aborted")
                self._notify()

    async def _matcher(self, params: SamplingParams) -> tuple[SamplingParams, Matcher]:
        """Compiles the grammar in a thread, since a large one takes long; the parameters get a way to end a turn."""
        if self._grammars is None or params.grammar is None:
            raise ConfigError("a grammar needs a tokenizer: this engine was made without NativeEngineOptions.tokenizer")
        matcher = await asyncio.to_thread(self._grammars.matcher, params.grammar)
        return replace(params, stop_token_ids=params.stop_token_ids or (self._grammars.eos,)), matcher

    async def abort(self, request_id: str) -> None:
        """Aborts the trajectory's request: `generate` returns the tokens sampled so far, with stop reason "aborted"."""
        self._compiling.discard(request_id)
        row = self._rows.get(request_id)
        if row is not None:
            self._drop_request(row, "aborted")
            self._notify()

    async def pause(self) -> None:
        """Waits for the running step to end; no other starts before `resume`."""
        self._paused = True
        self._use_running_loop()
        if self._stepping is not None:
            await asyncio.wait([asyncio.wrap_future(self._stepping.drawn)])

    async def resume(self) -> None:
        """Resumes after `pause`."""
        self._paused = False
        self._notify()

    async def load_weights(self, chunk: Chunk, sums: Mapping[str, int] | None = None) -> None:
        """Copies a chunk of named tensors into the engine's own weights (`sums`: see `WeightCopy.copy`). The first chunk of
        a sync pauses the engine and drops its caches; `update_weights` ends the sync.

        Raises:
            EtudeError: the model has no such tensor, or one of another shape; names it.
        """
        if self._incoming is None:
            self._paused_before = self._paused
            await self._stop_for_update()
            self._incoming = WeightCopy(self._model)
        self._incoming.copy(chunk, sums)

    async def update_weights(self, source: Any, version: int) -> None:
        """Switches to the new weights and drops all cached keys and values, which belong to the old ones. Requests in
        flight keep their sampled tokens and continue with the new weights. Linear layers that were replaced or patched since
        the last update are detected only here.

        Args:
            source: None if the weights are shared with the trainer; with `own_weights`, chunks of (name, tensor) as
                `full_state` yields them, copied in place in addition to those that `load_weights` has copied.

        Raises:
            EtudeError: a tensor is missing, has another shape, or is not what was sent; names it.
            ConfigError: `source` is None with `own_weights`, or is given without.
        """
        if (source is None) != self.shares_weights:
            given, needs = ("chunks", "None") if self.shares_weights else ("None", "chunks of named tensors")
            raise ConfigError(f"update_weights was given source={given}: this native engine takes {needs}")
        was_paused = self._paused if self._incoming is None else self._paused_before
        try:
            await self._stop_for_update()
            if source is not None:
                incoming, self._incoming = self._incoming or WeightCopy(self._model), None
                for chunk in source:
                    incoming.copy(chunk)
                incoming.check()
            elif self._model is not self._source:
                with torch.no_grad():
                    for old, new in zip(self._model.parameters(), self._source.parameters()):
                        if new.requires_grad:  # with LoRA, the adapters
                            old.copy_(new)
            self._version = version
        finally:
            if not was_paused:
                await self.resume()

    async def _stop_for_update(self) -> None:
        """Pauses, since a running step reads the caches, and then drops them."""
        await self.pause()
        self._scheduler.forget_all()
        self._prepacked.drop()
        if self._caches is not None:
            self._caches.forget()
        if self._images is not None:
            self._images.forget()

    def checksums(self) -> dict[str, int]:
        """Returns the checksums of the weights used for sampling, by name (see `etude.models.named_weights`)."""
        return weight_checksums(self._model)

    def metrics(self) -> Metrics:
        """Returns the metrics since the last call; `EngineMetrics.report` has their names and units."""
        metrics, self._metrics = self._metrics, EngineMetrics()
        metrics.context_tokens, self._scheduler.context_tokens = self._scheduler.context_tokens, 0
        metrics.preemptions, self._scheduler.preemptions = self._scheduler.preemptions, 0
        return metrics.report(self.options.max_num_seqs)

    # -- steps ---------------------------------------------------------------------------------------------------
    # Steps are chained by callbacks, not run by one task: an event loop may end during a step, and another continue it.

    def _use_running_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._wake = loop, None
            if self._stepping is not None:
                self._deliver(self._stepping.drawn)

    def _notify(self) -> None:
        """Schedules `_advance` after the callbacks that are already queued, so that concurrent requests share a step."""
        if self._wake is None and self._loop is not None and not self._loop.is_closed():
            self._wake = self._loop.call_soon(self._advance)

    def _advance(self) -> None:
        """Admits requests and starts a step, unless one is running or there is nothing to compute yet."""
        self._wake, scheduler = None, self._scheduler
        try:
            while self._stepping is None and not self._paused and (scheduler.queue or scheduler.active):
                at_point = not scheduler.active or self._steps_since_point >= self.options.admit_every
                if self.options.deterministic and at_point and any(row.request is None for row in self._rows.values()):
                    return  # an open trajectory is between turns: its next request may still come
                with self._metrics.timed("scheduling"):
                    if at_point or not self.options.deterministic:
                        self._admissions += 1
                        scheduler.admit()
                        self._steps_since_point = 0
                    plan = scheduler.plan() if scheduler.active else None
                    self._metrics.kv_bytes = max(self._metrics.kv_bytes, scheduler.cache.slab_bytes)
                if plan is not None and plan.feeds:
                    self._steps_since_point += 1
                    requests = {row: row.request for row in scheduler.active}
                    self._stepping = _Step(plan, requests, self._threads.submit(plan.tokens, self._compute, plan))
                    self._deliver(self._stepping.drawn)
        except Exception as error:  # runs as a callback: without this, requests would wait forever
            self._fail(error)

    def _deliver(self, drawn: Future[list[_Draw]]) -> None:
        """Schedules `_finish` on the engine's event loop once the step is computed. The callback, which the future keeps,
        must not hold the step: that cycle would keep the step's part of the cache until the next garbage collection."""
        loop = self._loop
        assert loop is not None

        def deliver(drawn: Future[list[_Draw]]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._finish, drawn)

        drawn.add_done_callback(deliver)

    def _finish(self, drawn: Future[list[_Draw]]) -> None:
        step = self._stepping
        if step is None or step.drawn is not drawn:  # already finished: it was scheduled on two event loops
            return
        self._stepping, scheduler = None, self._scheduler
        self.steps_done += 1
        try:
            draws = drawn.result()
            with self._metrics.timed("scheduling"):
                scheduler.fed(step.plan)
                for (row, _), draw in zip(step.plan.drawing, draws):
                    request = step.requests[row]
                    if request is not None and row.request is request:
                        self._append_token(row, request, draw)
                scheduler.active = [row for row, request in step.requests.items() if row.request is request]
                scheduler.sweep()
        except Exception as error:
            self._fail(error)
        self._advance()

    def _append_token(self, row: SequenceState, request: Request, draw: _Draw) -> None:
        if isinstance(draw, GrammarError):
            row.request = None
            if not request.future.done():
                request.future.set_exception(draw)
            return
        token, log_prob, kept = draw
        request.tokens.append(token)
        request.kept_ids.append(kept)
        request.log_probs.append(log_prob)
        request.versions.append(self._version)
        self._metrics.sampled_tokens += 1
        self.tokens_done += 1
        row.feed = [token]
        stopped = token in request.params.stop_token_ids
        if request.stops is not None:
            stopped = stopped or request.stops.complete(request.tokens)
        if stopped or len(request.tokens) >= request.limit:
            row.request = None
            request.finish("stop" if stopped else "length", row.routed_experts())

    def _drop_request(self, row: SequenceState, reason: str) -> None:
        request, row.request = row.request, None
        if request is None:
            return
        request.finish(reason)
        if row in self._scheduler.queue:
            self._scheduler.queue.remove(row)
        if self._stepping is None:  # otherwise the step's end sweeps
            self._scheduler.sweep()

    def _fail(self, error: Exception) -> None:
        """Fails every request in flight and starts with an empty cache."""
        failure = EngineError(f"inference step failed: {type(error).__name__}: {one_line(error)}")
        failure.__cause__ = error
        old, self._scheduler = self._scheduler, self._new_scheduler()
        for row in [*old.active, *old.queue]:
            if row.request is not None and not row.request.future.done():
                row.request.future.set_exception(failure)
            row.request = None
        self._scheduler.rows = {name: SequenceState(rank=row.rank) for name, row in old.rows.items()}

    # -- computing -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> list[_Draw]:
        """Runs one forward pass over the plan's tokens and draws a token for each row in `plan.drawing`."""
        with self._prepacked.used(plan.tokens):
            return self._computed(plan)

    def _computed(self, plan: StepPlan) -> list[_Draw]:
        metrics = self._metrics
        metrics.steps += 1
        metrics.rows += len(plan.feeds)
        metrics.prefilled_tokens += plan.prefill
        with metrics.timed("scheduling"):
            layout = StepLayout(plan.feeds, self._shape.device)
        ids, positions, images = layout.ids, layout.positions[None], self._images
        recording: Any = record_experts(self._model) if self._shape.experts else nullcontext([])
        with metrics.timed("decode", plan.prefill / layout.tokens), recording as chosen:
            if self._caches is not None:
                hidden = self._caches.hidden(plan.feeds)
            elif images is None:
                hidden = packed_hidden(self._model, ids, positions, layout)
            else:
                positions = images.rotary(layout.feeds, layout.positions)
                shown = images.features_of(layout.feeds)
                hidden = packed_hidden(self._model, images.token_ids(ids), positions, layout, shown)
        if chosen:
            layout.keep_experts(chosen)
        if not plan.drawing:
            return []
        with metrics.timed("sampling"):
            last = range(len(plan.feeds)) if self._caches is not None else layout.last
            logits = logits_of(self._model, hidden[[last[feed] for _, feed in plan.drawing]])
            requests = [row.request for row, _ in plan.drawing]
            params = [r.params if r else SamplingParams() for r in requests]
            found = [r.mask() if r else None for r in requests]
            masks = [None if isinstance(mask, GrammarError) else mask for mask in found]
            drawn = [len(r.tokens) if r else 0 for r in requests]
            tokens, log_probs, kept = sample(logits, params, drawn, masks)
            draws = zip(tokens.tolist(), log_probs.tolist(), kept)
            return [mask if isinstance(mask, GrammarError) else draw for mask, draw in zip(found, draws)]


def _copy_in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Returns a copy of the model with its weights in another precision; buffers (rotary frequencies) keep theirs."""
    made = copy.deepcopy(model).requires_grad_(False).eval()
    for parameter in made.parameters():
        if parameter.is_floating_point():  # integer parameters are quantised
            parameter.data = parameter.data.to(dtype)
    return made
