"""`RolloutWorker`: runs agent loops, the engine that they sample from, and the scoring of their trajectories;
`ActorRolloutRefWorker`: actor, reference and rollout in one process."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from etude.agents import AgentContext, AgentLoopManager, Sampling, to_batch
from etude.agents.batch import BY_GROUP, place_scores, rows_of
from etude.data import active_tools
from etude.distributed import Dispatch, register
from etude.errors import ConfigError
from etude.inference import ProbeDraws, evaluates_only
from etude.metrics import Metrics
from etude.models.heap import trim_heap
from etude.options import TrainOptions
from etude.protocol import DataProto
from etude.rewards import TrajectoryScorer
from etude.rewards.reward_model import RewardModel
from etude.timeouts import GRACE_SECONDS, settle
from etude.training import PolicyLearner
from etude.trajectory import Rollout
from etude.workers.actor import TrainWorker
from etude.workers.context import ToolCatalogue, load_context
from etude.workers.engine_link import EngineLink, build_engine
from etude.workers.generative import GenerativeRewardModel
from etude.workers.reward import build_scorer, open_reward_model
from etude.workers.role import HERE, Placement, RoleWorker
from etude.workers.stream import RolloutStream, Submission

ROLLOUT_MESH = "rollout"  # every rank has its own engine, even if ranks share a model in training
_MAX_INTERRUPTS = 8  # an interrupt raised inside a task ends the event loop once per task that it passes through


class RolloutWorker(RoleWorker):
    """Rolls out rows. Without a trainer, for instance in an evaluation, it samples from the model in its folder; in a
    separate group (`hybrid_engine=false`), from the weights that the training group sends.

    With `trainer.max_staleness`, its event loop runs in a separate thread: submitted groups roll out while the caller
    trains, on weights that change only in `update_weights`.
    """

    def __init__(self, options: TrainOptions, placement: Placement = HERE, **place: Any) -> None:
        super().__init__(options, placement, **place)
        self._standalone = placement.trains and options.has_rollout_group
        self._streams = placement.trains and options.trainer.max_staleness > 0
        self._loop = asyncio.new_event_loop()  # one for the worker's lifetime: tools may hold connections bound to it
        self._manager: AgentLoopManager | None = None
        self._thread: threading.Thread | None = None
        self._cancel: Callable[[], object] = lambda: None  # cancels the running call

    @cached_property
    def context(self) -> AgentContext:
        """Tools, interactions, environment, tokenizer and parser.

        Raises:
            ConfigError: one of them cannot be loaded, or an environment's judge is not a language model.
        """
        judge = self.reward_model if isinstance(self.reward_model, GenerativeRewardModel) else None
        if self.reward_model is not None and judge is None and not self.options.scores:
            raise ConfigError(
                f"reward_model.model.path={self.options.reward_model.model.path}: an environment's judge is a language "
                "model, and this is a classifier, which scores with another reward_manager than parallel"
            )
        return replace(load_context(self.options, self.bundle, self.world_size), reward_model=judge)

    @cached_property
    def reward_model(self) -> RewardModel | GenerativeRewardModel | None:
        """The model that scores here, or judges for an environment; its weights are loaded together with the policy's."""
        own = self.options.rollout.mode == "async" and self.options.scores
        return (
            open_reward_model(self.options, self.device) if own or self.options.actor_rollout_ref.env.chosen else None
        )

    @cached_property
    def scorer(self) -> TrajectoryScorer | None:
        """Scores trajectories as they end; None if `RewardWorker` scores them, or nothing does."""
        if self.options.rollout.mode != "async":
            return None
        return build_scorer(self.options, self.tokenizer, self.reward_model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_tools(self) -> ToolCatalogue:
        """Loads everything but models, and returns the catalogue of tools, interactions and agent loops.

        Raises:
            ConfigError: something in the rollout or reward section cannot be loaded.
        """
        _ = self.scorer
        return ToolCatalogue.of(self.context)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model, unless the engine loads its own, and builds the engine.

        Raises:
            ConfigError: the model's folder, or a name in the rollout section, is wrong.
        """
        actor = None
        if not (self._standalone or evaluates_only(self.options.rollout.name)):
            self.model = self.load_policy(self.dtype)
            actor = PolicyLearner(self.model, max_tokens=self.options.actor.ppo_max_token_len_per_gpu)
        self.start_engine(actor)

    def start_engine(self, actor: PolicyLearner | None) -> None:
        """Builds the engine and the manager. `actor` holds the weights to sample from; with `max_staleness`, the engine
        copies them in `update_weights`. None: the engine has its own."""
        options, context = self.options, self.context
        if self.reward_model is not None:
            self.reward_model.load()
        shared = None if actor is None or self._streams else actor.model
        engine = build_engine(options, shared, self.tokenizer, (self.rank, self.world_size), self.placement)
        self._manager = AgentLoopManager(
            context,
            engine,
            self.scorer,
            deterministic=options.trainer.deterministic,
            stall_timeout=options.trainer.stall_timeout,
        )
        self._link = EngineLink(
            engine,
            options.rollout,
            context.chat,
            actor,
            self.dtype,
            options.trainer.max_staleness + 1,
            streams=self._streams,
            receives=self._standalone and actor is None,
        )
        if self._streams:
            self._stream = RolloutStream(self._manager, self._loop)
            self._thread = threading.Thread(target=self._serve, name="etude-rollout", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        """Runs the event loop until it is stopped; an interrupt raised in a task is re-raised by `collect`."""
        while True:
            try:
                return self._loop.run_forever()
            except BaseException as error:
                self._stream.fail(error)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> Metrics:
        """Syncs the current weights to the engine as `version`, and probes it (see `EngineLink.push`). Trajectories in
        flight continue on the new weights (`rollout.partial_rollout`) or finish first."""
        metrics: Metrics = self._run(self._push(version))
        return metrics

    async def _push(self, version: int) -> Metrics:
        await self._pause()
        try:
            return await self._link.push(version)
        finally:
            if self._manager is not None:
                self._manager.paused = False
            if self._thread is not None:
                self._stream.resume()

    async def _pause(self) -> None:
        """Waits for trajectories in flight, unless weights may change during a trajectory, and pauses the manager's, from a
        sync's first chunk to its end, so that none counts as stalled."""
        if self._thread is not None and not self.options.rollout.partial_rollout:
            await self._stream.drain()
        if self._manager is not None:
            self._manager.paused = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_weights(self, chunk: DataProto) -> None:
        """Takes a chunk of weights from another group (see `weight_chunks.py`), which `update_weights` activates.

        Raises:
            EtudeError: a tensor differs from what was sent, or the engine's model does not have it; names it.
        """
        self._run(self._receive(chunk))

    async def _receive(self, chunk: DataProto) -> None:
        await self._pause()
        await self._link.receive(chunk)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def probe_draws(self) -> list[ProbeDraws]:
        """The probe's samples after the last update, to be judged by the training group."""
        return self._link.drawn

    @register(dispatch_mode=BY_GROUP, mesh=ROLLOUT_MESH)
    def generate_sequences(self, data: DataProto) -> DataProto:
        """Rolls out each row once.

        Needs the dataset's object columns, `uid`, and in meta_info `seed` (of this batch) and `validate`; optionally
        `least_group`, the minimum number of survivors per `uid` (see `AgentLoopManager.generate`), and `greedy`. Returns the
        columns of `etude.agents.to_batch`, in row order, and `token_level_scores` (see `place_scores`); dropped rows have an
        all-zero mask. The engine's metrics are in `meta_info["metrics"]`, except with `max_staleness`, where `collect`
        returns them.
        """
        if not len(data):
            return DataProto()
        manager, work = self._manager, self._asked("", data)
        assert manager is not None, "init_model() comes first"
        self._run(self._link.ready())
        results = self._run(manager.generate(work.rows, work.sampling, least_group=work.least_group))
        batch = self._to_batch(work, results)
        trim_heap()
        if self._thread is None:
            self._run(self._link.rest())
            batch.meta_info["metrics"] = self._link.metrics()
        return batch

    def _asked(self, key: str, data: DataProto) -> Submission:
        """Builds the rows and sampling parameters for a batch."""
        rollout, validate = self.options.rollout, bool(data.meta_info.get("validate"))
        chosen: Any = rollout.val_kwargs if validate else rollout
        greedy = data.meta_info.get("greedy") or not chosen.do_sample
        temperature = 0.0 if greedy else chosen.temperature
        heads = 0 if validate else self.options.algorithm.rollout_correction.score_centering_topk
        sampling = Sampling(temperature, chosen.top_p, chosen.top_k, int(data.meta_info["seed"]), heads)
        rows = rows_of(data)
        for row in rows:
            row["active_tools"] = active_tools(row, list(self.context.tools))
            row |= {"validate": validate, "step": data.meta_info.get("step")}
        return Submission(key, rows, sampling, int(data.meta_info.get("least_group", 1)))

    def _to_batch(self, work: Submission, results: list[Rollout]) -> DataProto:
        """Builds the batch of finished rollouts, with their rewards unless `RewardWorker` still has to score them."""
        batch = to_batch(results, self.tokenizer.pad_token_id or 0)
        if self.options.rollout.mode == "async" or not self.options.scores:
            place_scores(batch, self.options.reward_model, work.rows)
        return batch

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def submit(self, key: str, data: DataProto) -> None:
        """Starts to roll out one group, as `generate_sequences` would; `collect` returns it under `key`."""
        self._stream.submit(self._asked(key, data))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def collect(self, seconds: float) -> tuple[list[tuple[str, DataProto]], Metrics]:
        """Returns the submitted groups that have ended since the last call, as `generate_sequences` does, and the engine's
        metrics since then, with `judge/…`, what judges used; waits up to `seconds` for the first.

        Raises:
            Exception: a trajectory failed for a reason that is not infrastructure.
        """
        finished = [(group.key, self._to_batch(group, results)) for group, results in self._stream.collect(seconds)]
        judged = {f"judge/{name}": value for name, value in self._stream.judged().items()}
        return finished, self._run(self._engine_metrics()) | judged

    async def _engine_metrics(self) -> Metrics:
        return self._link.metrics()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, in_background=True)
    def progress(self) -> tuple[int, int, int]:
        """(finished, total) trajectories of the current (or last) rollout, and the tokens sampled so far (0: not counted);
        may be called while it runs."""
        manager = self._manager
        return (0, 0, 0) if manager is None else (*manager.progress, int(getattr(manager.engine, "tokens_done", 0)))

    def interrupt(self) -> None:
        """Cancels the running call, which releases its tools."""
        self._cancel()

    def close(self) -> None:
        """Cancels tasks still running in the worker's event loop (an abandoned engine step, a tool's connection) and shuts
        down the engine."""
        if self._thread is not None:
            self._run(self._stream.close())
        if self._manager is not None and hasattr(self._manager.engine, "shutdown"):
            self._run(self._manager.engine.shutdown())
        if self._thread is not None:
            self._run(self._settle())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._thread = None
        elif asyncio.all_tasks(self._loop):
            self._loop.run_until_complete(self._settle())

    async def _settle(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await settle(tasks, GRACE_SECONDS)

    def _run(self, work: Any) -> Any:
        """Runs a coroutine to completion; an interrupt cancels it, which releases its tools, before it is re-raised."""
        if self._thread is not None:
            return self._run_in_thread(work)
        task = self._loop.create_task(work)
        self._cancel = functools.partial(self._loop.call_soon_threadsafe, task.cancel)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            task.cancel()
            for _ in range(_MAX_INTERRUPTS):
                with suppress(KeyboardInterrupt):
                    self._loop.run_until_complete(asyncio.wait({task}))
                    break
            raise

    def _run_in_thread(self, work: Coroutine[Any, Any, Any]) -> Any:
        ended = threading.Event()

        async def run() -> Any:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        self._cancel = future.cancel
        try:
            return future.result()
        except BaseException:
            if future.cancel() and self._manager is not None:
                ended.wait(self._manager.clean_up_seconds + GRACE_SECONDS)
            raise


class ActorRolloutRefWorker(TrainWorker, RolloutWorker):
    """Samples, computes log-probs and trains, on one model.

    Invariant: no rollout starts before the engine is notified of new weights: an in-process engine samples from the tensors
    that the actor updates, so without the notification its caches would be stale.
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        """Initialises both roles on one model, loaded once."""
        TrainWorker.init_model(self, total_steps)
        self.start_engine(self._actor)

    def weights_changed(self) -> None:
        """Requires an `update_weights` before the next rollout."""
        self._link.is_current = False
