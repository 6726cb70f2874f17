"""The native engine: continuous batching over a Hugging Face causal LM, in this process, on CPU or one GPU.

Requests join and leave between decode steps; a trajectory's keys and values stay in its slot from turn to turn, so that a
turn feeds only what is new; trajectories that begin with the same prompt share one prefill. The model is the trainer's
own object: there is nothing to copy after an update, only caches to forget.

Deterministic mode. Results depend on which rows share a step, since a matrix product may round differently at another
batch size. So which rows share a step must not depend on the clock: requests are admitted only at *scheduling points*
(every `admit_every` steps, or when no row is left to decode), in row order, and at such a point the engine first waits
until every open trajectory has either asked for its next turn or been closed. Between points, tools run while others
decode. A slow tool then delays a point; it never changes a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from etude.errors import ConfigError, EngineError, one_line
from etude.inference.cache import RowFeed, SlotCache, StepLayout
from etude.inference.sampling import sample
from etude.inference.types import ENGINES, SamplingParams, TokenOutput
from etude.models.packed import enable_packing, packed_hidden


@dataclass(frozen=True)
class NativeEngineOptions:
    """`max_num_seqs`: trajectories with a cache slot; `max_num_batched_tokens`: tokens a step feeds at most;
    `max_model_len`: longest context (None: the model's own limit); `admit_every`: decode steps between scheduling
    points of the deterministic mode."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    deterministic: bool = False
    admit_every: int = 8


@dataclass
class _Request:
    prompt: list[int]
    params: SamplingParams
    limit: int
    future: asyncio.Future[TokenOutput]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def finish(self, reason: str) -> None:
        if not self.future.done():
            self.future.set_result(TokenOutput(self.tokens, self.log_probs, reason, self.versions))


@dataclass(eq=False)
class _Row:
    """A trajectory: its slot, the ids whose keys and values the slot holds, and those still to be fed."""

    rank: tuple[int, int, str]
    slot: int | None = None
    cached: list[int] = field(default_factory=list)
    feed: list[int] = field(default_factory=list)
    request: _Request | None = None
    leader: _Row | None = None  # a row that is prefilling the same prompt


@ENGINES.register("native")
class NativeEngine:
    """See the module's first paragraph; the interface is `etude.inference.Engine`."""

    def __init__(self, model: Any, options: NativeEngineOptions | None = None) -> None:
        """Raises ConfigError where the architecture is not supported (see `etude.models.packed`)."""
        enable_packing(model)
        self.options = options or NativeEngineOptions()
        self._model = model
        config = model.config
        self._limit = self.options.max_model_len or int(config.max_position_embeddings)
        if self._limit > config.max_position_embeddings:
            raise ConfigError(
                f"max_model_len {self._limit} is more than the model's {config.max_position_embeddings} positions"
            )
        self._device = next(model.parameters()).device
        self._version = 0
        self._rows: dict[str, _Row] = {}
        self._queue: list[_Row] = []
        self._active: list[_Row] = []
        self._closed: list[_Row] = []  # their slots are free from the next admission on
        self._admissions = 0
        self._paused = False
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._stepping: asyncio.Future[Any] | None = None
        self._counters = dict.fromkeys(("sampled_tokens", "prefilled_tokens", "steps", "row_steps"), 0.0)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="etude-engine")
        self._cache = self._new_cache()

    def _new_cache(self) -> SlotCache:
        config = self._model.config
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        dtype = next(self._model.parameters()).dtype
        return SlotCache(config.num_hidden_layers, kv_heads, head_dim, dtype, self._device)

    # -- the interface -------------------------------------------------------------------------------------------

    def open(self, request_ids: Sequence[str]) -> None:
        """Announces trajectories, in row order.

        Those announced one by one between two scheduling points rank by their ids: which lane was free first is the
        clock's doing.
        """
        for place, request_id in enumerate(request_ids):
            if request_id in self._rows:
                raise ConfigError(f"trajectory '{request_id}' is already open")
            self._rows[request_id] = _Row(rank=(self._admissions, place, request_id))

    def close(self, request_id: str) -> None:
        """Frees the trajectory's slot; closing twice, or what was never opened, does nothing."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        self._drop_request(row, "aborted")
        if row.slot is not None:
            self._closed.append(row)
        self._notify()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        *,
        images: Sequence[Any] | None = None,
    ) -> TokenOutput:
        """Samples a continuation; only the part of `prompt_ids` that the slot does not hold yet is computed.

        Raises:
            EngineError: a step failed, for instance for lack of memory.
        """
        if images:
            raise ConfigError("the native engine takes text only")
        params = SamplingParams.of(sampling_params)
        if request_id not in self._rows:
            self.open([request_id])
        row = self._rows[request_id]
        if row.request is not None:
            raise ConfigError(f"trajectory '{request_id}' already has a request under way")
        limit = min(params.max_tokens, self._limit - len(prompt_ids))
        if not prompt_ids or limit < 1:
            return TokenOutput([], [], "length", [])
        loop = asyncio.get_running_loop()
        request = row.request = _Request(list(prompt_ids), params, limit, loop.create_future())
        self._queue.append(row)
        if self._model.training:
            self._model.eval()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        self._notify()
        try:
            return await request.future
        finally:
            if row.request is request:  # cancelled while under way
                self._drop_request(row, "aborted")
                self._notify()

    async def abort(self, request_id: str) -> None:
        """Ends the trajectory's request; its `generate` returns what was sampled, with stop reason "aborted"."""
        row = self._rows.get(request_id)
        if row is not None:
            self._drop_request(row, "aborted")
            self._notify()

    async def pause(self) -> None:
        """Returns once no step is running; none starts before `resume`."""
        self._paused = True
        if self._stepping is not None:
            await asyncio.wait([self._stepping])

    async def resume(self) -> None:
        """Goes on after `pause`."""
        self._paused = False
        self._notify()

    async def update_weights(self, source: Any, version: int) -> None:
        """Forgets every cached key and value: they belong to the old weights.

        Args:
            source: None; the native engine shares its weights with the trainer.
        """
        if source is not None:
            raise ConfigError("the native engine shares the trainer's weights: update_weights takes source=None")
        was_paused = self._paused
        try:
            await self.pause()  # a step under way still reads what is forgotten here
            self._version = version
            for row in self._rows.values():
                held, row.cached, row.leader = row.cached, [], None
                row.feed = held + row.feed if row in self._active else []
        finally:
            if not was_paused:
                await self.resume()

    def metrics(self) -> dict[str, float]:
        """Counts since the last call: sampled and prefilled tokens, steps, mean rows a step."""
        counters, self._counters = self._counters, dict.fromkeys(self._counters, 0.0)
        occupancy = counters.pop("row_steps") / max(counters["steps"], 1.0)
        return counters | {"rows_per_step": occupancy}

    # -- scheduling ----------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _wait(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake

    def _waiting_for(self) -> bool:
        """Whether some open trajectory is between turns (a tool runs), so that its next request may still come."""
        return any(row.request is None for row in self._rows.values())

    async def _run(self) -> None:
        try:
            await self._serve()
        except Exception as error:  # nobody awaits this task: without this its requests would wait for ever
            self._fail(error)

    async def _serve(self) -> None:
        steps_since_point = 0
        while self._queue or self._active:
            if self._paused:
                await self._wait()
                continue
            at_point = not self._active or steps_since_point >= self.options.admit_every
            if self.options.deterministic and at_point and self._waiting_for():
                await self._wait()
                continue
            if at_point or not self.options.deterministic:
                self._admit()
                steps_since_point = 0
            if not self._active:  # every slot is held by a trajectory that is between turns
                await self._wait()
                continue
            await self._step()
            steps_since_point += 1

    def _admit(self) -> None:
        """Moves queued rows into the batch, in row order, as far as slots reach."""
        self._admissions += 1
        for row in self._closed:
            if row.slot is not None:
                self._cache.give_back(row.slot)
                row.slot = None
        self._closed = []
        self._queue.sort(key=lambda row: row.rank)
        leaders: dict[tuple[int, ...], _Row] = {}
        waiting: list[_Row] = []
        for row in self._queue:
            assert row.request is not None
            if row.slot is None:
                if self._cache.in_use >= self.options.max_num_seqs:
                    waiting.append(row)
                    continue
                row.slot = self._cache.take()
            prompt = row.request.prompt
            held = _common_prefix(row.cached, prompt)
            held = min(held, len(prompt) - 1)  # the last token must be fed: its logits are wanted
            row.cached, row.feed = prompt[:held], prompt[held:]
            if not held:
                leader = leaders.setdefault(tuple(prompt), row)
                row.leader = None if leader is row else leader
            self._active.append(row)
        self._queue = waiting
        self._active.sort(key=lambda row: row.rank)

    def _plan(self) -> list[tuple[_Row, int]]:
        """How many tokens each row feeds in the next step: one for every decoding row, then prompts while room lasts."""
        room = self.options.max_num_batched_tokens - sum(len(row.feed) == 1 for row in self._active)
        plan = []
        for row in self._active:
            if row.leader is not None:
                continue
            count = 1 if len(row.feed) == 1 else min(len(row.feed), room)
            if count > 0:
                room -= count if len(row.feed) > 1 else 0
                plan.append((row, count))
        return plan or [(self._active[0], min(len(self._active[0].feed), self.options.max_num_batched_tokens))]

    async def _step(self) -> None:
        plan = self._plan()
        drawing = [row for row, count in plan if count == len(row.feed)]
        leaders = set(drawing)
        followers = [row for row in self._active if row.leader in leaders]
        # While the step runs a request may be dropped, and its row may even get another one.
        served = [(row, row.request) for row in self._active]
        draws = [(row, row.request) for row in drawing + followers]
        loop = asyncio.get_running_loop()
        self._stepping = loop.run_in_executor(self._thread, self._compute, plan, drawing, followers)
        try:
            tokens, log_probs = await self._stepping
        except Exception as error:
            self._fail(error)
            return
        finally:
            self._stepping = None
        for row, count in plan:
            row.cached += row.feed[:count]
            row.feed = row.feed[count:]
        for row, request in draws[len(drawing) :]:
            row.cached, row.feed, row.leader = list(request.prompt) if request else [], [], None
        for (row, request), token, log_prob in zip(draws, tokens, log_probs):
            if request is not None and row.request is request:
                self._take(row, request, token, log_prob)
        self._active = [row for row, request in served if row.request is request]
        self._sweep([row for row, _ in served])

    def _take(self, row: _Row, request: _Request, token: int, log_prob: float) -> None:
        request.tokens.append(token)
        request.log_probs.append(log_prob)
        request.versions.append(self._version)
        self._counters["sampled_tokens"] += 1
        row.feed = [token]
        stopped = token in request.params.stop_token_ids
        if stopped or len(request.tokens) >= request.limit:
            row.request = None
            request.finish("stop" if stopped else "length")

    def _sweep(self, rows: list[_Row]) -> None:
        """Takes rows without a request out of the batch; whoever waited for their prefill computes it itself."""
        self._active = [row for row in self._active if row.request is not None]
        staying = set(self._active)
        for row in rows:
            if row not in staying:
                row.feed, row.leader = [], None
            elif row.leader not in staying:
                row.leader = None

    def _drop_request(self, row: _Row, reason: str) -> None:
        request, row.request = row.request, None
        if request is None:
            return
        request.finish(reason)
        if row in self._queue:
            self._queue.remove(row)
        if self._stepping is None:  # otherwise the step's end sweeps
            self._sweep(list(self._active))

    def _fail(self, error: Exception) -> None:
        """A step failed: every request under way fails with it, and the cache starts anew."""
        failure = EngineError(f"inference step failed: {type(error).__name__}: {one_line(error)}")
        failure.__cause__ = error
        for row in [*self._active, *self._queue]:
            if row.request is not None and not row.request.future.done():
                row.request.future.set_exception(failure)
            row.request = None
        self._active, self._queue, self._closed = [], [], []
        self._cache = self._new_cache()
        for row in self._rows.values():
            row.slot, row.cached, row.feed, row.leader = None, [], [], None

    # -- computing -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _compute(
        self, plan: list[tuple[_Row, int]], drawing: list[_Row], followers: list[_Row]
    ) -> tuple[list[int], list[float]]:
        """One forward pass over the plan's tokens; draws one token for each of `drawing` and `followers`."""
        feeds, ids = [], []
        for row, count in plan:
            assert row.slot is not None
            feeds.append(RowFeed(row.slot, len(row.cached), count))
            ids += row.feed[:count]
        self._cache.reserve(max(feed.start + feed.count for feed in feeds))
        layout = StepLayout(self._cache, feeds, self._device)
        hidden = packed_hidden(self._model, torch.tensor(ids, device=self._device), layout.positions[None], layout)
        self._counters["steps"] += 1
        self._counters["row_steps"] += len(plan)
        self._counters["prefilled_tokens"] += sum(f.count for f in feeds if f.count > 1)
        if not drawing:
            return [], []
        wanted = [i for i, (row, count) in enumerate(plan) if count == len(row.feed)]
        logits = self._model.get_output_embeddings()(hidden[layout.last[wanted]])
        places = {id(row): i for i, row in enumerate(drawing)}
        for row in followers:
            assert row.slot is not None
            assert row.leader is not None
            assert row.leader.slot is not None
            self._cache.copy(row.leader.slot, row.slot, len(row.leader.cached) + len(row.leader.feed))
        if followers:
            logits = logits[list(range(len(drawing))) + [places[id(row.leader)] for row in followers]]
        requests = [row.request for row in drawing + followers]
        params = [r.params if r else SamplingParams() for r in requests]
        tokens, log_probs = sample(logits, params, [len(r.tokens) if r else 0 for r in requests])
        return tokens.tolist(), log_probs.tolist()


def _common_prefix(a: list[int], b: list[int]) -> int:
    if a == b[: len(a)]:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
