"""`AgentLoopManager`: rolls out a batch of rows, each trajectory independently, and scores each as soon as it ends.

There is no barrier between trajectories: one waits for a tool while others decode and others are being scored.

Failures (DESIGN, "Wrong is not broken"): a trajectory with an infrastructure failure, or that took longer than
`trajectory_timeout`, is retried from fresh state under a new request id up to `infrastructure_retries` times, then dropped;
scoring has the same number of retries. If nothing progresses for `stall_timeout` (no generation, tool call, scoring or
trajectory ends, and no engine step), everything in flight is retried once, whatever `infrastructure_retries`, then dropped.
Any other
exception is a bug in the user's code or in Étude: everything is cancelled, tools are released, and it is raised; only an
`AgentError` just drops its own rollout. A group with fewer than `least_group` survivors is dropped: its running and waiting
rows are cancelled and their tools released.

Invariant: one rollout per row, in row order, including failed ones; a dropped rollout has no sequences. Every trajectory
opened at the engine is closed, however it ends.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from etude.agents.base import AGENT_LOOPS, AgentContext
from etude.agents.client import TrajectoryClient
from etude.agents.validation import check_tools_shown, validate_output
from etude.errors import WARNING, AgentError, ConfigError, Stalled, debugging, describe_error, is_infrastructure
from etude.inference import Engine
from etude.rewards.scoring import TIMEOUT_KEY, AsyncScorer, score_rollout
from etude.seeds import group_seed, trajectory_seed
from etude.timeouts import GRACE_SECONDS, called, result_of, settle
from etude.tools import BrokenCall, CallPolicy
from etude.tools.session import watch_sessions
from etude.trace import TraceSpan, span
from etude.trajectory import AgentLoopOutput, Rollout, StopReason, Trajectory

logger = logging.getLogger(__name__)

_LOCKSTEP = (
    "; in the deterministic mode the engine goes on when every trajectory asks it or has ended: agents must not wait for "
    "one another"
)
_USERS = ("raw_prompt", "extra_info", "reward_model", "tools_kwargs", "interaction_kwargs")
"""Columns that users' code gets and may write to: the rollouts of a prompt share the values of their rows."""
_CHECKS = 10  # for progress, per `stall_timeout`
_RELAXED_GC = (300_000, 20, 20)
"""A thousand trajectories keep millions of objects alive; a full pass traverses them all."""
_UNTRAINABLE = (StopReason.PROMPT_TOO_LONG, StopReason.CONTEXT_REFUSED)


@dataclass(frozen=True)
class Sampling:
    """Sampling of one batch: a trajectory's seed is derived from `seed` and the row's `rollout_index`."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    top_logprobs: int = 0

    def params(self, index: int, max_tokens: int, stops: Sequence[int]) -> dict[str, Any]:
        """Returns the `sampling_params` for a loop's `run`."""
        own = {"top_logprobs": self.top_logprobs} if self.top_logprobs else {}
        return own | {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": max_tokens,
            "stop_token_ids": tuple(stops),
            "seed": trajectory_seed(self.seed, index),
        }


class AgentLoopManager:
    """Runs agent loops over rows; `scorer` scores each rollout, if given."""

    def __init__(
        self,
        context: AgentContext,
        engine: Engine,
        scorer: AsyncScorer | None = None,
        *,
        deterministic: bool = False,
        stall_timeout: float | None = None,
    ) -> None:
        """`stall_timeout`: in seconds; None: nothing stalls."""
        self.context, self.engine, self.scorer = context, engine, scorer
        self.progress = (0, 0)  # (ended, total) trajectories since last idle; may be read from another thread
        self._batches: list[_Batch] = []  # batches in flight
        self.paused = False  # the engine is paused on purpose: nothing stalls
        self.deterministic, self._stall_timeout = deterministic, stall_timeout
        self._watch: asyncio.Task[None] | None = None  # while batches are in flight
        self._gc_thresholds = _RELAXED_GC  # to restore after them
        self._logged = False
        slowest = max(
            (CallPolicy.from_config(t.config, name).timeout for name, t in context.tools.items()), default=0.0
        )
        self.clean_up_seconds = slowest + 4 * GRACE_SECONDS  # the longest that a ToolSession may take to close

    async def generate(
        self, rows: Sequence[Mapping[str, Any]], sampling: Sampling, *, least_group: int = 1
    ) -> list[Rollout]:
        """Rolls out every row.

        A row may have `rollout_index` (its index in the whole step's batch), `group_seed` (the same for all rollouts of a
        prompt; default: its own) and `active_tools` (names of the configured tools that it may use; default all).
        `least_group`: minimum survivors per group (rows with the same `uid`); a group with fewer is dropped.

        Raises:
            ConfigError: a row names an agent loop that does not exist; raised before any work.
            EtudeError, Exception: a loop, tool or scorer failed, and not because of infrastructure.
        """
        batch = _Batch(self, [dict(row) for row in rows], sampling, least_group)
        lanes = min(self.context.options.max_concurrent_trajectories, len(rows))
        rest = iter(range(lanes, len(rows)))
        ended, total = self.progress if self._batches else (0, 0)
        self.progress = (ended, total + len(rows))
        self._batches.append(batch)
        if len(self._batches) == 1:
            self._begin()
        try:
            batch.open([batch.request_id(i, 0) for i in range(lanes)])
            for lane in range(lanes):
                # In deterministic mode, which rows a lane takes must not depend on timing.
                following = iter(range(lane + lanes, len(rows), lanes)) if self.deterministic else rest
                batch.tasks.start(batch.lane(lane, following))
            await batch.tasks.finish(self.clean_up_seconds + GRACE_SECONDS)
        finally:
            self._batches.remove(batch)
            batch.close_all()
            if not self._batches:
                self._end()
        return batch.rollouts

    def _begin(self) -> None:
        """Before the first batch in flight: watches for stalls, and garbage collection passes over older objects."""
        if self._stall_timeout is not None:
            self._watch = asyncio.ensure_future(self._retry_stalled(self._stall_timeout))
        gc.freeze()
        self._gc_thresholds = gc.get_threshold()
        gc.set_threshold(*_RELAXED_GC)

    def _end(self) -> None:
        gc.unfreeze()
        if self._gc_thresholds != _RELAXED_GC:  # set by another manager, which restores them
            gc.set_threshold(*self._gc_thresholds)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def loop_name(self, row: Mapping[str, Any]) -> str:
        """Returns the agent loop of a row: its `agent_name`, or `rollout.agent.default_agent_loop`, or, if an environment is
        configured, `env_agent` (`driving_agent` for one that drives itself), or `tool_agent` if the row has tools or an
        interaction, else `single_turn_agent`.

        With `multi_turn.enable=false`, `single_turn_agent` replaces `tool_agent`.
        """
        options = self.context.options
        chosen, enabled = row.get("agent_name") or options.agent.default_agent_loop, options.multi_turn.enable
        if chosen and (enabled or chosen != "tool_agent"):
            return str(chosen)
        if self.context.environment is not None and enabled and not chosen:
            return "driving_agent" if self.context.environment.pick(row).drives else "env_agent"
        several_turns = row.get("active_tools", list(self.context.tools)) or row.get("interaction_kwargs")
        return "tool_agent" if several_turns and enabled else "single_turn_agent"

    def steps_done(self) -> int:
        """Number of engine steps so far; 0 if the engine does not count them."""
        return int(getattr(self.engine, "steps_done", 0))

    async def _retry_stalled(self, seconds: float) -> None:
        """Whenever nothing has progressed for `seconds`, logs what trajectories wait for, and has everything in flight
        retried."""
        state, unchanged = self._state(), 0
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(seconds / _CHECKS)
            if (blocked := time.monotonic() - asleep) > seconds:
                logger.warning("the event loop did not answer for %.0f s: something blocked it", blocked)
            last, state = state, self._state()
            unchanged = 0 if self.paused or state != last else unchanged + 1
            waits: dict[str, list[str]] = defaultdict(list)
            for batch in self._batches if unchanged == _CHECKS else ():
                for what, request_id in batch.waits():
                    waits[what].append(request_id)
                batch.cancel_stalled(Stalled(f"nothing had progressed for {seconds:g} s (trainer.stall_timeout)"))
            if waits:
                unchanged = 0
                found = [f"trajectory {ids[0]} waits for {what}, {len(ids) - 1} more" for what, ids in waits.items()]
                logger.warning(
                    "nothing has progressed for %g s: %s; all of these are tried again, once", seconds, "; ".join(found)
                )

    def _state(self) -> tuple[int, ...]:
        """Changes with every progress."""
        return (*self.progress, self.steps_done(), *(part for batch in self._batches for part in batch.state()))

    def log_failure(self, request_id: str, error: BaseException) -> None:
        """Logs the first failure as a warning, and later ones, which the metrics count, at INFO."""
        logger.log(
            logging.INFO if self._logged else logging.WARNING,
            "trajectory %s failed, and is tried again or dropped: %s",
            request_id,
            describe_error(error),
            exc_info=error if debugging() and not self._logged else None,
        )
        self._logged = True


class _Batch:
    """The rows of one `generate`. A lane is a coroutine that rolls out one row after another."""

    def __init__(
        self, manager: AgentLoopManager, rows: list[dict[str, Any]], sampling: Sampling, least_group: int
    ) -> None:
        """Raises ConfigError if a row names an agent loop that does not exist."""
        self._manager, self._rows, self._sampling = manager, rows, sampling
        self._engine, self._options = manager.engine, manager.context.options
        self.rollouts = [Rollout() for _ in rows]
        self._submitted_at = time.time()
        self.tasks = TaskGroup()
        self._opened: set[str] = set()
        self._uids, self._least_group = [row.get("uid", i) for i, row in enumerate(rows)], least_group
        self._groups: dict[Any, list[int]] = defaultdict(list)
        for i, uid in enumerate(self._uids):
            self._groups[uid].append(i)
        self._cancelled_rows: set[int] = set()
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._clients: dict[int, TrajectoryClient] = {}  # of those
        self._scoring: dict[int, asyncio.Task[Any]] = {}
        self._stalled: dict[int, Stalled] = {}  # those of either that are being cancelled because of a stall
        for i, row in enumerate(rows):
            row["request_id"] = f"{row.get('uid', 'row')}/{row.get('rollout_index', i)}"
            row.setdefault("group_seed", group_seed(sampling.seed, row.get("rollout_index", i)))
            try:
                AGENT_LOOPS.get(manager.loop_name(row))
            except ConfigError as error:
                raise ConfigError(f"row {row['request_id']}: agent_name: {error}") from error
        self._to_trace: set[int] = set()
        self._decode = None  # decodes the texts of traced generations
        if (tracer := manager.context.tracer) is not None:
            self._to_trace = tracer.chosen([*map(str, self._uids)], rows[0].get("step") if rows else None)
            self._decode = manager.context.tokenizer.decode if tracer.token2text else None

    def request_id(self, index: int, attempt: int) -> str:
        """Returns the request id of a row's attempt at the engine."""
        return f"{self._rows[index]['request_id']}/{attempt}"

    def open(self, request_ids: Sequence[str]) -> None:
        """Opens trajectories at the engine."""
        self._engine.open(request_ids)
        self._opened.update(request_ids)

    def _close(self, request_id: str, then_open: str | None = None) -> None:
        """Closes a trajectory and, with no await in between (see `NativeEngine`), opens the next one."""
        self._opened.discard(request_id)
        self._engine.close(request_id)
        if then_open is not None:
            self.open([then_open])

    def close_all(self) -> None:
        """Closes all trajectories that an exception left open."""
        for request_id in sorted(self._opened):
            self._close(request_id)

    async def lane(self, first: int, following: Iterator[int]) -> None:
        """Rolls out the row `first`, then the rows of `following`, one after another."""
        index: int | None = first
        while index is not None:
            last_id = await self._roll_out(index)
            self._cancel_small_group(index)
            done, index = index, next(following, None)
            self._close(last_id, None if index is None else self.request_id(index, 0))
            self.tasks.start(self._finish(done))

    async def _roll_out(self, index: int) -> str:
        """Runs a row until it succeeds or is out of retries; returns the last request id, which the caller closes."""
        rollout, options, context = self.rollouts[index], self._options, self._manager.context
        row, request_id = self._rows[index], ""
        name, number = self._manager.loop_name(row), int(row.get("rollout_index", index))
        for attempt in range(options.infrastructure_retries + 2):  # one more, for a stall
            if rollout.stalls > 1 or attempt > options.infrastructure_retries + rollout.stalls:
                break
            request_id, rollout.attempts = self.request_id(index, attempt), attempt
            if attempt:
                self._close(self.request_id(index, attempt - 1), request_id)
            if index in self._cancelled_rows:
                rollout.drop(StopReason.CANCELLED)
                return request_id
            rollout.attempts += 1
            client = self._clients[index] = TrajectoryClient(self._engine, request_id, self._decode)
            params = self._sampling.params(number, options.response_length, context.chat.stop_token_ids)
            params["stop"] = tuple(options.stop or ())
            own = {name: copy.deepcopy(row[name]) for name in _USERS if name in row}
            row_with_ids = {**row, **own, "request_id": request_id, "attempt": attempt}
            waited = time.time() - self._submitted_at
            try:
                with self._trace(index, request_id) as trajectory_span:
                    task = self._running[index] = asyncio.ensure_future(
                        called(_run_loop, name, context, client, params, row_with_ids)
                    )
                    clean_up = self._manager.clean_up_seconds
                    returned = await result_of(task, options.trajectory_timeout, clean_up, TIMEOUT_KEY)
                    if trajectory_span is not None:
                        _describe(trajectory_span, returned)
                rollout.sequences = validate_output(
                    returned, client, name, options.response_length, options.agent.roles
                )
                loop = AGENT_LOOPS.get(name)
                is_ours = getattr(loop, "loop_class", loop).__module__.startswith("etude.")
                if client.sessions and not is_ours:  # ours are checked when rows are loaded
                    check_tools_shown(rollout.sequences[0], client.sessions, context, name, row)
            except AgentError as error:
                rollout.cause = describe_error(error)
                rollout.drop(StopReason.AGENT_ERROR)
                return request_id
            except Exception as error:
                if not is_infrastructure(error):
                    raise
                if index in self._cancelled_rows:
                    rollout.drop(StopReason.CANCELLED)
                    return request_id
                self._note_failure(rollout, request_id, self._stalled.pop(index, error))
                continue
            finally:
                self._running.pop(index, None)
                self._clients.pop(index, None)
                self._stalled.pop(index, None)
                client.end()
            rollout.sequences[-1].timeline.insert(0, ("queue", self._submitted_at, waited))
            for sequence in rollout.sequences:
                sequence.sampling = {key: params[key] for key in ("temperature", "top_p", "top_k")}
            if (reason := rollout.sequences[-1].stop_reason) in _UNTRAINABLE:
                rollout.drop(reason)
            return request_id
        rollout.drop(StopReason.INFRASTRUCTURE)
        return request_id

    def _note_failure(self, rollout: Rollout, request_id: str, error: Exception) -> None:
        self._manager.log_failure(request_id, error)
        rollout.failures += 1
        rollout.stalls += isinstance(error, Stalled)
        rollout.broken_calls += [error.record] if isinstance(error, BrokenCall) else []
        rollout.cause = describe_error(error)
        if self._manager.deterministic and isinstance(error, TimeoutError | asyncio.TimeoutError):
            rollout.cause += _LOCKSTEP

    def _trace(self, index: int, request_id: str) -> AbstractContextManager[TraceSpan | None]:
        tracer, row = self._manager.context.tracer, self._rows[index]
        if tracer is None or index not in self._to_trace:
            return nullcontext()
        names = ("step", "uid", "index", "rollout_index", "validate", "data_source")
        named = {name: row[name] for name in names if row.get(name) is not None}
        return tracer.trajectory(request_id, {"request_id": request_id, **named})

    async def _finish(self, index: int) -> None:
        """Scores a finished rollout, if there is a scorer, and counts it in `progress`."""
        manager = self._manager
        if manager.scorer is not None:
            own = self.rollouts[index].trajectory
            if own is not None and own.rewards.score is not None:
                _warn_of_own_score(manager.loop_name(self._rows[index]))
            await score_rollout(
                self.rollouts[index],
                self._rows[index],
                partial(self._score, index, manager.scorer),
                retries=self._options.infrastructure_retries,
                timeout=self._options.trajectory_timeout,
                on_failure=manager.log_failure,
            )
            self._cancel_small_group(index)
        ended, total = manager.progress
        manager.progress = (ended + 1, total)

    async def _score(self, index: int, scorer: AsyncScorer, trajectory: Trajectory, row: Mapping[str, Any]) -> None:
        """Scores a trajectory; retries once after a stall, then drops the rollout."""
        rollout = self.rollouts[index]
        while True:
            with span("scorer", ""):
                task = self._scoring[index] = asyncio.ensure_future(called(scorer, trajectory, row))
                try:
                    return await task
                except asyncio.CancelledError:
                    if index not in self._stalled:
                        raise
                finally:
                    del self._scoring[index]
            self._note_failure(rollout, trajectory.request_id, self._stalled.pop(index))
            if rollout.stalls > 1:
                return rollout.drop(StopReason.INFRASTRUCTURE)

    def waits(self) -> Iterator[tuple[str, str]]:
        """Yields (what it waits for, its request id) of each attempt and scoring in flight."""
        yield from ((client.waits_for, client.request_id) for client in self._clients.values())
        yield from (("the scorer", self._rows[index]["request_id"]) for index in self._scoring)

    def state(self) -> tuple[int, ...]:
        """Numbers that change when an attempt or scoring begins, ends or progresses."""
        return (len(self._scoring), *(part for i, c in self._clients.items() for part in (i, c.progress)))

    def cancel_stalled(self, error: Stalled) -> None:
        """Cancels all attempts and scorings in flight; each is retried once."""
        for index, task in {**self._running, **self._scoring}.items():
            if not task.done():
                self._stalled[index] = error
                task.cancel()

    def _cancel_small_group(self, index: int) -> None:
        """If the row was dropped for an infrastructure failure and its group is now too small, cancels the group's other
        rows."""
        if self.rollouts[index].dropped is not StopReason.INFRASTRUCTURE:
            return
        group = self._groups[self._uids[index]]
        left = [row for row in group if self.rollouts[row].dropped is not StopReason.INFRASTRUCTURE]
        if len(left) < self._least_group <= len(group):
            for other in set(left) - self._cancelled_rows:
                self._cancelled_rows.add(other)
                if other in self._running:
                    self._running[other].cancel()


@cache
def _warn_of_own_score(loop: str) -> None:
    problem = f"the agent loop '{loop}' gives a score of its own, which the reward manager's replaces"
    logger.warning(WARNING, problem, "set reward_model.enable=false")


async def _run_loop(
    name: str, context: AgentContext, client: TrajectoryClient, params: dict[str, Any], row: dict[str, Any]
) -> object:
    loop = AGENT_LOOPS.get(name)(
        trainer_config=context, server_manager=client, tokenizer=context.tokenizer, processor=context.processor
    )
    client.tools = context.tools
    with watch_sessions() as client.sessions:
        return await called(loop.run, params, **row)


def _describe(trajectory_span: TraceSpan, returned: object) -> None:
    """Adds the outcome to a trajectory's trace span, if the loop returned a trajectory."""
    trajectory = returned[-1] if isinstance(returned, list) and returned else returned
    if isinstance(trajectory, AgentLoopOutput):
        trajectory = trajectory.trajectory
    if isinstance(returned, list):
        trajectory_span.set(sequences=len(returned))
    if isinstance(trajectory, Trajectory):
        rewards = trajectory.rewards
        trajectory_span.set(
            stop_reason=trajectory.stop_reason.value,
            turns=trajectory.num_turns,
            response_tokens=trajectory.response_length,
            step_rewards=[value for _, _, value in rewards.steps],
            final_rewards=rewards.final,
        )


class TaskGroup:
    """Tasks of one event loop that may start further tasks, and that succeed or fail together.

    Invariant: `finish` returns once every task has succeeded. On the first exception, or when its caller is cancelled, all
    other tasks are cancelled and get time to clean up; none is left running.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task; does nothing once the group has finished."""
        if self._over.done():
            work.close()
            return
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    async def finish(self, grace: float) -> None:
        """Waits for all tasks; cancelled ones have `grace` seconds to clean up.

        Raises:
            Exception: the first exception that a task raised.
        """
        try:
            if self._tasks:
                await self._over
        finally:
            self._over.cancel()
            await settle(self._tasks, grace)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if self._over.done():
            return
        if error is not None:
            self._over.set_exception(error)
        elif task.cancelled():
            self._over.cancel()
        elif not self._tasks:
            self._over.set_result(None)
