"""`AgentLoopManager`: rolls out a batch of rows, each trajectory on its own, and scores each the moment it ends.

There is no barrier between trajectories: one waits for a tool while others decode and others are being scored.

Failures (DESIGN, "Wrong is not broken"): a trajectory that infrastructure broke is run again from fresh state up to
`infrastructure_retries` times, then dropped; a scorer that infrastructure broke is asked again as often. Any other
exception is a bug of the user's or ours: everything is cancelled, tools are released, and it is raised.

Invariant: one result a row, in row order, whatever happened; a dropped row has no trajectory.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.agents.base import AGENT_LOOPS, AgentContext, TrajectoryClient
from etude.errors import ConfigError, InfrastructureError, is_infrastructure, one_line
from etude.inference import Engine
from etude.trajectory import StopReason, Trajectory

logger = logging.getLogger(__name__)

Scorer = Callable[[Trajectory, Mapping[str, Any]], Awaitable[None]]
Progress = Callable[[int, int], None]


@dataclass
class RolloutResult:
    """A row's trajectory, or why there is none. `attempts` counts runs, `failures` those that infrastructure broke."""

    trajectory: Trajectory | None
    attempts: int = 1
    failures: int = 0
    dropped: StopReason | None = None


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
        self.on_progress: Progress | None = None
        self._deterministic = deterministic
        self._logged = False

    async def generate(self, rows: Sequence[Mapping[str, Any]], sampling: Sampling) -> list[RolloutResult]:
        """Rolls out every row; a row may carry `rollout_index` (its number in the whole step's batch).

        Raises:
            EtudeError, Exception: a loop, tool or scorer failed for a reason that is not infrastructure.
        """
        run = _Run(self, [dict(row) for row in rows], sampling)
        return await run.all()

    def _report(self, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(done, total)

    def _log_failure(self, request_id: str, error: BaseException) -> None:
        """The first failure with its traceback, the others in a line."""
        logger.warning(
            "trajectory %s broken by infrastructure: %s: %s",
            request_id,
            type(error).__name__,
            one_line(error),
            exc_info=None if self._logged else error,
        )
        self._logged = True


class _Run:
    """One batch. Lanes are coroutines that each roll out one trajectory after another."""

    def __init__(self, manager: AgentLoopManager, rows: list[dict[str, Any]], sampling: Sampling) -> None:
        self._manager, self._rows, self._sampling = manager, rows, sampling
        self._engine, self._options = manager.engine, manager.context.options
        self._results: list[RolloutResult | None] = [None] * len(rows)
        self._scoring: list[asyncio.Task[None]] = []
        self._done = 0

    async def all(self) -> list[RolloutResult]:
        count = len(self._rows)
        lanes = min(self._options.max_concurrent_trajectories, count)
        for i, row in enumerate(self._rows):  # before any work: a bad name must not cost a rollout
            row["request_id"] = f"{row.get('uid', 'row')}/{row.get('rollout_index', i)}"
            AGENT_LOOPS.get(self._loop_name(row))
        shared = iter(range(lanes, count))
        self._engine.open([self._id(i, 0) for i in range(lanes)])
        # Which trajectory follows which must not depend on the clock in the deterministic mode.
        follow: Callable[[int], Iterator[int]] = (
            (lambda lane: iter(range(lane + lanes, count, lanes)))
            if self._manager._deterministic
            else (lambda lane: shared)
        )
        await _all_or_cancel([self._lane(lane, follow(lane)) for lane in range(lanes)])
        await _all_or_cancel(self._scoring)
        return [result for result in self._results if result is not None]

    def _id(self, index: int, attempt: int) -> str:
        return f"{self._rows[index]['request_id']}/{attempt}"

    def _loop_name(self, row: Mapping[str, Any]) -> str:
        chosen = row.get("agent_name")
        if chosen:
            return str(chosen)
        active = row.get("active_tools", list(self._manager.context.tools))
        return "tool_agent" if active else "single_turn_agent"

    async def _lane(self, first: int, following: Iterator[int]) -> None:
        index: int | None = first
        try:
            while index is not None:
                result, last_id = await self._attempts(index)
                self._results[index] = result
                done, index = index, next(following, None)
                self._engine.close(last_id)  # and, with no await between, open the next: see NativeEngine
                if index is not None:
                    self._engine.open([self._id(index, 0)])
                self._scoring.append(asyncio.ensure_future(self._finish(done)))
        finally:
            if index is not None:
                for attempt in range(self._options.infrastructure_retries + 1):
                    self._engine.close(self._id(index, attempt))

    async def _attempts(self, index: int) -> tuple[RolloutResult, str]:
        """Runs a row until it succeeds or its retries are spent; the last request is left open for the lane to close."""
        limit = self._options.infrastructure_retries + 1
        for attempt in range(limit):
            request_id = self._id(index, attempt)
            if attempt:
                self._engine.close(self._id(index, attempt - 1))
                self._engine.open([request_id])
            try:
                trajectory = await asyncio.wait_for(self._run_once(index, request_id), self._options.trajectory_timeout)
            except Exception as error:
                if not is_infrastructure(error):
                    raise
                self._manager._log_failure(request_id, error)
                continue
            if trajectory.stop_reason is StopReason.PROMPT_TOO_LONG:
                return RolloutResult(None, attempt + 1, attempt, StopReason.PROMPT_TOO_LONG), request_id
            return RolloutResult(trajectory, attempt + 1, attempt), request_id
        return RolloutResult(None, limit, limit, StopReason.INFRASTRUCTURE), request_id

    async def _run_once(self, index: int, request_id: str) -> Trajectory:
        context, row = self._manager.context, self._rows[index]
        client = TrajectoryClient(self._engine, request_id)
        loop_class = AGENT_LOOPS.get(self._loop_name(row))
        loop = loop_class(
            trainer_config=context, server_manager=client, tokenizer=context.tokenizer, processor=None
        )
        number = int(row.get("rollout_index", index))
        params = self._sampling.params(number, self._options.response_length, context.chat.stop_token_ids)
        output = await loop.run(params, **{**row, "request_id": request_id})
        client.check(output)
        trajectory = output.to_trajectory(request_id)
        if len(trajectory.response_ids) > self._options.response_length:
            raise ConfigError(
                f"the agent loop '{self._loop_name(row)}' returned {len(trajectory.response_ids)} response tokens, more "
                f"than data.max_response_length={self._options.response_length}"
            )
        return trajectory

    async def _finish(self, index: int) -> None:
        """Scores a finished trajectory, unless scoring is left to a later stage."""
        result, scorer = self._results[index], self._manager.scorer
        assert result is not None
        if result.trajectory is not None and scorer is not None:
            await self._score(result, result.trajectory, scorer, self._rows[index])
        self._done += 1
        self._manager._report(self._done, len(self._rows))

    async def _score(self, result: RolloutResult, trajectory: Trajectory, scorer: Scorer, row: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self._options.infrastructure_retries + 1):
            started = loop.time()
            try:
                await scorer(trajectory, row)
            except Exception as error:
                if not is_infrastructure(error):
                    raise
                result.failures += 1
                self._manager._log_failure(trajectory.request_id, InfrastructureError(f"scoring: {one_line(error)}"))
                continue
            trajectory.timings["compute_score"] = loop.time() - started
            return
        result.trajectory, result.dropped = None, StopReason.INFRASTRUCTURE


async def _all_or_cancel(work: Iterable[Coroutine[Any, Any, None] | asyncio.Task[None]]) -> None:
    """Awaits everything; on the first exception cancels the rest, waits for their clean-up, and raises it."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
