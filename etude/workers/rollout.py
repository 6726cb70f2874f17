"""`RolloutWorker`: agent loops, the engine that they sample from, and the scoring of their trajectories."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import cached_property
from typing import Any

from etude.agents import AgentContext, AgentLoopManager, Sampling, to_batch
from etude.agents.batch import BY_GROUP, rows_of
from etude.bounded import GRACE_SECONDS
from etude.data import active_tools
from etude.distributed import Dispatch, register
from etude.inference import evaluates_only
from etude.metrics import Metrics
from etude.protocol import DataProto
from etude.rewards import TrajectoryScorer
from etude.training import PolicyEngine
from etude.workers.context import ToolCatalogue, load_context
from etude.workers.engine_link import EngineLink, build_engine
from etude.workers.options import RoleOptions
from etude.workers.reward import build_scorer
from etude.workers.role import RoleWorker

ROLLOUT_MESH = "rollout"  # every rank has an engine of its own, also where ranks share a model in training
_MAX_INTERRUPTS = 8  # an interrupt raised inside a task ends the event loop once per task that it passes through


class RolloutWorker(RoleWorker):
    """Rolls out rows. Alone, for instance in an evaluation, it samples from the model as loaded from its folder."""

    def __init__(self, options: RoleOptions, **place: Any) -> None:
        super().__init__(options, **place)
        self._loop = asyncio.new_event_loop()  # one for the worker's lifetime: tools may keep connections in it
        self._manager: AgentLoopManager | None = None
        self._task: asyncio.Task[Any] | None = None

    @cached_property
    def context(self) -> AgentContext:
        """Tools, interactions, environment, tokenizer and parser."""
        return load_context(self.options, self.bundle)

    @cached_property
    def scorer(self) -> TrajectoryScorer | None:
        """Scores trajectories as they end; None where `RewardWorker` does, or nothing."""
        return build_scorer(self.options, self.tokenizer) if self.options.rollout.mode == "async" else None

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
        """Loads the model, unless the engine samples from one of its own, and builds the engine.

        Raises:
            ConfigError: the model's folder, or a name in the rollout section, is wrong.
        """
        actor = None
        if not evaluates_only(self.options.rollout.name):
            self.model = self.load_policy(self.options.model.dtype)
            actor = PolicyEngine(self.model, max_tokens=self.options.actor.ppo_max_token_len_per_gpu)
        self.start_engine(actor)

    def start_engine(self, actor: PolicyEngine | None) -> None:
        """`actor` holds the weights that are sampled from; None: the engine has its own."""
        options, context = self.options, self.context
        engine = build_engine(options, None if actor is None else actor.model, self.tokenizer)
        self._manager = AgentLoopManager(context, engine, self.scorer, deterministic=options.deterministic)
        self._link = EngineLink(engine, options.rollout, context.chat, actor, options.model.dtype)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> Metrics:
        """Hands the current weights to the engine as `version`, and probes it (see `EngineLink.push`)."""
        metrics: Metrics = self._run(self._link.push(version))
        return metrics

    @register(dispatch_mode=BY_GROUP, mesh=ROLLOUT_MESH)
    def generate_sequences(self, data: DataProto) -> DataProto:
        """Rolls out each row once.

        Needs the dataset's object columns, `uid`, and in meta_info `seed` (of this batch) and `validate`; optionally
        `least_group`, the minimum number of survivors per `uid` (see `AgentLoopManager.generate`), and `greedy`. Returns the
        columns of `etude.agents.to_batch`, in the rows' order; dropped rows have an all-zero mask. `meta_info` gains
        `metrics`, the engine's metrics.
        """
        if not len(data):
            return DataProto()
        rollout, validate = self.options.rollout, bool(data.meta_info.get("validate"))
        chosen: Any = rollout.val_kwargs if validate else rollout
        greedy = data.meta_info.get("greedy") or not chosen.do_sample
        temperature = 0.0 if greedy else chosen.temperature
        sampling = Sampling(temperature, chosen.top_p, chosen.top_k, int(data.meta_info["seed"]))
        manager = self._manager
        assert manager is not None, "init_model() comes first"
        rows = rows_of(data)
        for row in rows:
            row["active_tools"] = active_tools(row, list(manager.context.tools))
            row |= {"validate": validate, "step": data.meta_info.get("step")}
        self._run(self._link.ready())
        least = int(data.meta_info.get("least_group", 1))
        results = self._run(manager.generate(rows, sampling, least_group=least))
        self._run(self._link.rest())
        batch = to_batch(results, self.tokenizer.pad_token_id or 0)
        batch.meta_info["metrics"] = manager.engine.metrics()
        return batch

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def progress(self) -> tuple[int, int]:
        """(finished, total) trajectories of the current (or last) rollout; may be called while it runs."""
        return (0, 0) if self._manager is None else self._manager.progress

    def interrupt(self) -> None:
        """Cancels the running rollout, which releases its tools."""
        if (task := self._task) is not None:
            self._loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Cancels tasks still running in the worker's event loop (an abandoned engine step, a tool's connection)."""
        if pending := asyncio.all_tasks(self._loop):
            for task in pending:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(pending, timeout=GRACE_SECONDS))

    def _run(self, work: Any) -> Any:
        """Runs a coroutine to its end; an interrupt cancels it, which releases its tools, before it is raised."""
        task = self._task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            task.cancel()
            for _ in range(_MAX_INTERRUPTS):
                with suppress(KeyboardInterrupt):
                    self._loop.run_until_complete(asyncio.wait({task}))
                    break
            raise
        finally:
            self._task = None
