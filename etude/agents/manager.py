"""`AgentLoopManager`: rolls out a batch of rows, each trajectory on its own, and scores each the moment it ends.

There is no barrier between trajectories: one waits for a tool while others decode and others are being scored.

Failures (DESIGN, "Wrong is not broken"): a trajectory that infrastructure broke, or that took longer than
`trajectory_timeout`, is run again from fresh state under a new request id up to `infrastructure_retries` times, then
dropped; a scorer that infrastructure broke is asked again as often. Any other exception is a bug of the user's or ours:
everything is cancelled, tools are released, and it is raised. A group that such losses have left without enough survivors
to learn from (`least_group`) is given up: what still runs or waits of it is cancelled and its tools are released.

Invariant: one result a row, in row order, whatever happened; a dropped row has no trajectory. Every trajectory that was
opened at the engine is closed, in every ending.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from etude.agents.acceptance import accepted
from etude.agents.base import AGENT_LOOPS, AgentContext
from etude.agents.client import TrajectoryClient
from etude.agents.collector import calm_collector
from etude.agents.crew import Crew
from etude.agents.groups import Groups
from etude.agents.result import RolloutResult
from etude.agents.scoring import Scorer, score_result
from etude.bounded import GRACE_SECONDS, called, result_of
from etude.errors import ConfigError, debugging, describe_error, is_infrastructure
from etude.inference import Engine
from etude.tools import BrokenCall, CallPolicy
from etude.trace import TraceSpan
from etude.trajectory import AgentLoopOutput, StopReason, ToolCallRecord, Trajectory

logger = logging.getLogger(__name__)

_LOCKSTEP = (
    "; in the deterministic mode the engine goes on when every trajectory asks it or has ended: agents must not wait for "
    "one another"
)


@dataclass(frozen=True)
class Sampling:
    """Sampling of one batch: a trajectory's seed is derived from `seed` and the row's `rollout_index`."""

    temperature: float
    top_p: float
    top_k: int
    seed: int

    def params(self, index: int, max_tokens: int, stops: Sequence[int]) -> dict[str, Any]:
        """What a loop's `run` receives."""
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=7).digest()
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": max_tokens,
            "stop_token_ids": tuple(stops),
            "seed": int.from_bytes(digest, "big"),
        }


class AgentLoopManager:
    """Runs agent loops over rows; `scorer` (from the rewards room) is handed in from above."""

    def __init__(
        self, context: AgentContext, engine: Engine, scorer: Scorer | None = None, *, deterministic: bool = False
    ) -> None:
        self.context, self.engine, self.scorer = context, engine, scorer
        self.progress = (0, 0)  # (ended, all) of the batch under way; may be read from another thread
        self._deterministic = deterministic
        self._logged = False
        slowest = max(
            (CallPolicy.from_config(t.config, name).timeout for name, t in context.tools.items()), default=0.0
        )
        self._clean_up_seconds = slowest + 4 * GRACE_SECONDS  # as long as a ToolSession may take to close

    async def generate(
        self, rows: Sequence[Mapping[str, Any]], sampling: Sampling, *, least_group: int = 1
    ) -> list[RolloutResult]:
        """Rolls out every row; a row may carry `rollout_index` (its number in the whole step's batch) and `active_tools`
        (names of those configured tools that it may use; default all). `least_group`: survivors among the rows of one
        `uid` below which none of them is of use.

        Raises:
            ConfigError: a row names an agent loop that does not exist (before any work).
            EtudeError, Exception: a loop, tool or scorer failed for a reason that is not infrastructure.
        """
        run = _Run(self, [dict(row) for row in rows], sampling, least_group)
        with calm_collector():
            return await run.all()

    def loop_name(self, row: Mapping[str, Any]) -> str:
        """The agent loop of a row: its `agent_name`, or `rollout.agent.default_agent_loop`, or `env_agent` where an
        environment is configured, or `tool_agent` if the row has tools or an interaction, else `single_turn_agent`.

        With `multi_turn.enable=false` a row that asks for `tool_agent` gets its single turn.
        """
        options = self.context.options
        chosen, enabled = row.get("agent_name") or options.agent.default_agent_loop, options.multi_turn.enable
        if chosen and (enabled or chosen != "tool_agent"):
            return str(chosen)
        if self.context.environment is not None and enabled and not chosen:
            return "env_agent"
        several_turns = row.get("active_tools", list(self.context.tools)) or row.get("interaction_kwargs")
        return "tool_agent" if several_turns and enabled else "single_turn_agent"

    def _log_failure(self, request_id: str, error: BaseException) -> None:
        """The first failure as a warning; the others are counted in the metrics, and seen at INFO."""
        logger.log(
            logging.INFO if self._logged else logging.WARNING,
            "trajectory %s broken by infrastructure: %s",
            request_id,
            describe_error(error),
            exc_info=error if debugging() and not self._logged else None,
        )
        self._logged = True


class _Run:
    """One batch. Lanes are coroutines that each roll out one trajectory after another."""

    def __init__(
        self, manager: AgentLoopManager, rows: list[dict[str, Any]], sampling: Sampling, least_group: int
    ) -> None:
        self._manager, self._rows, self._sampling = manager, rows, sampling
        self._engine, self._options = manager.engine, manager.context.options
        self._results: list[RolloutResult | None] = [None] * len(rows)
        self._opened: set[str] = set()
        self._crew = Crew()
        self._to_trace: set[int] = set()
        self._groups = Groups([row.get("uid", i) for i, row in enumerate(rows)], least_group)
        self._given_up: set[int] = set()
        self._under_way: dict[int, asyncio.Task[list[Trajectory]]] = {}
        self._done = 0

    async def all(self) -> list[RolloutResult]:
        for i, row in enumerate(self._rows):  # before any work: a bad name must not cost a rollout
            row["request_id"] = f"{row.get('uid', 'row')}/{row.get('rollout_index', i)}"
            try:
                AGENT_LOOPS.get(self._manager.loop_name(row))
            except ConfigError as error:
                raise ConfigError(f"row {row['request_id']}: agent_name: {error}") from error
        if (tracer := self._manager.context.tracer) is not None:
            self._to_trace = tracer.chosen([str(row.get("uid", i)) for i, row in enumerate(self._rows)])
        self._manager.progress = (0, len(self._rows))
        lanes = min(self._options.max_concurrent_trajectories, len(self._rows))
        follow = self._followers(lanes)
        try:
            self._open([self._id(i, 0) for i in range(lanes)])
            for lane in range(lanes):
                self._crew.start(self._lane(lane, follow(lane)))
            await self._crew.finish(self._manager._clean_up_seconds + GRACE_SECONDS)
        finally:
            for request_id in sorted(self._opened):
                self._close(request_id)
        return [result for result in self._results if result is not None]

    def _followers(self, lanes: int) -> Callable[[int], Iterator[int]]:
        """The rows that a lane takes after its first one; in the deterministic mode they must not depend on the clock."""
        count = len(self._rows)
        shared = iter(range(lanes, count))
        if self._manager._deterministic:
            return lambda lane: iter(range(lane + lanes, count, lanes))
        return lambda lane: shared

    def _id(self, index: int, attempt: int) -> str:
        return f"{self._rows[index]['request_id']}/{attempt}"

    def _open(self, request_ids: Sequence[str]) -> None:
        self._engine.open(request_ids)
        self._opened.update(request_ids)

    def _close(self, request_id: str, then_open: str | None = None) -> None:
        """Closes a trajectory and, with no await between (see `NativeEngine`), opens the one that follows it."""
        self._opened.discard(request_id)
        self._engine.close(request_id)
        if then_open is not None:
            self._open([then_open])

    async def _lane(self, first: int, following: Iterator[int]) -> None:
        index: int | None = first
        while index is not None:
            result, last_id = await self._attempts(index)
            self._results[index] = result
            self._note_loss(index)
            done, index = index, next(following, None)
            self._close(last_id, None if index is None else self._id(index, 0))
            if self._manager.scorer is None:
                self._count()
            else:
                self._crew.start(self._finish(done, self._manager.scorer))

    async def _attempts(self, index: int) -> tuple[RolloutResult, str]:
        """Runs a row until it succeeds or its retries are spent; the last request is left open for the lane to close."""
        limit = self._options.infrastructure_retries + 1
        cause = ""
        broken: list[ToolCallRecord] = []
        for attempt in range(limit):
            request_id = self._id(index, attempt)
            if attempt:
                self._close(self._id(index, attempt - 1), request_id)
            if index in self._given_up:
                return RolloutResult(None, attempt, attempt, StopReason.CANCELLED, cause, broken), request_id
            client = self._client(request_id)
            task = self._under_way[index] = asyncio.ensure_future(called(self._run_once, index, attempt, client))
            try:
                grace = self._manager._clean_up_seconds
                *earlier, trajectory = await result_of(task, self._options.trajectory_timeout, grace)
            except Exception as error:
                if not is_infrastructure(error):
                    raise
                if index in self._given_up:
                    return RolloutResult(None, attempt + 1, attempt, StopReason.CANCELLED, cause, broken), request_id
                self._manager._log_failure(request_id, error)
                broken += [error.record] if isinstance(error, BrokenCall) else []
                cause = describe_error(error)
                if self._manager._deterministic and isinstance(error, TimeoutError | asyncio.TimeoutError):
                    cause += _LOCKSTEP
                continue
            finally:
                del self._under_way[index]
                client.end()
            if trajectory.stop_reason in (StopReason.PROMPT_TOO_LONG, StopReason.CONTEXT_REFUSED):
                return RolloutResult(None, attempt + 1, attempt, trajectory.stop_reason, cause, broken), request_id
            return RolloutResult(trajectory, attempt + 1, attempt, None, cause, broken, earlier), request_id
        return RolloutResult(None, limit, limit, StopReason.INFRASTRUCTURE, cause, broken), request_id

    async def _run_once(self, index: int, attempt: int, client: TrajectoryClient) -> list[Trajectory]:
        """The sequences of one run, the main one last."""
        context, row = self._manager.context, self._rows[index]
        name = self._manager.loop_name(row)
        loop = AGENT_LOOPS.get(name)(
            trainer_config=context, server_manager=client, tokenizer=context.tokenizer, processor=context.processor
        )
        number = int(row.get("rollout_index", index))
        params = self._sampling.params(number, self._options.response_length, context.chat.stop_token_ids)
        params["stop"] = tuple(self._options.stop or ())
        with self._traced(index, client.request_id) as whole:
            returned = await loop.run(params, **{**row, "request_id": client.request_id, "attempt": attempt})
            if whole is not None:
                _describe(whole, returned)
        sequences = accepted(returned, client, name, self._options.response_length)
        for sequence in sequences:
            sequence.sampling = {key: params[key] for key in ("temperature", "top_p", "top_k")}
        return sequences

    def _client(self, request_id: str) -> TrajectoryClient:
        context = self._manager.context
        texts = context.tracer is not None and context.tracer.token2text
        return TrajectoryClient(self._engine, request_id, context.tokenizer.decode if texts else None)

    def _traced(self, index: int, request_id: str) -> AbstractContextManager[TraceSpan | None]:
        tracer, row = self._manager.context.tracer, self._rows[index]
        if tracer is None or index not in self._to_trace:
            return nullcontext()
        names = ("step", "uid", "index", "rollout_index", "validate", "data_source")
        named = {name: row[name] for name in names if row.get(name) is not None}
        return tracer.trajectory(request_id, {"request_id": request_id, **named})

    async def _finish(self, index: int, scorer: Scorer) -> None:
        """Scores a finished trajectory."""
        result = self._results[index]
        assert result is not None
        await score_result(
            result,
            self._rows[index],
            scorer,
            retries=self._options.infrastructure_retries,
            timeout=self._options.trajectory_timeout,
            on_failure=self._manager._log_failure,
        )
        self._note_loss(index)
        self._count()

    def _note_loss(self, index: int) -> None:
        """Where infrastructure took the row and its group is of no use without it, gives up the group's other rows."""
        result = self._results[index]
        if result is None or result.dropped is not StopReason.INFRASTRUCTURE:
            return
        for other in self._groups.lost(index):
            self._given_up.add(other)
            if other in self._under_way:
                self._under_way[other].cancel()

    def _count(self) -> None:
        self._done += 1
        self._manager.progress = (self._done, len(self._rows))


def _describe(whole: TraceSpan, returned: object) -> None:
    """What a trajectory's span says of its end, where the loop returned one."""
    output = returned[-1] if isinstance(returned, list) and returned else returned
    trajectory = output.trajectory if isinstance(output, AgentLoopOutput) else None
    if isinstance(returned, list):
        whole.set(sequences=len(returned))
    if trajectory is not None:
        rewards = trajectory.rewards
        whole.set(
            stop_reason=trajectory.stop_reason.value,
            turns=trajectory.num_turns,
            response_tokens=trajectory.response_length,
            step_rewards=[value for _, _, value in rewards.steps],
            final_rewards=rewards.final,
        )
