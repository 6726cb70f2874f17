"""The reward manager `batch`: one call for many trajectories, for functions that benefit from batching (a model's
forward pass).

A function that declares `solution_strs` gets lists, as in verl: `data_sources, solution_strs, ground_truths,
extra_infos`, and `trajectories`; it returns a list of numbers or dicts. An exception in place of one fails that row
alone; one that is raised fails them all. Any other function is called once per row, all rows of a batch concurrently.

A batch is flushed when it holds `batch_size` rows, or `max_wait` seconds after its first row: with `rollout.mode=sync`
it holds all trajectories, otherwise those that ended close together. Where batching brings nothing, use `naive`, which
never waits for other rows.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import Any

from etude.errors import InfrastructureError
from etude.options.declare import key, options
from etude.options.types import Count, NonNegative
from etude.rewards.default import BATCH_ARGUMENTS, Score, Scorer
from etude.rewards.manager import BoundedScorer, NaiveRewardManager, register
from etude.rewards.user_functions import user_function
from etude.timeouts import gather, set_outcome

Waiting = list[tuple[dict[str, Any], asyncio.Future[Score]]]


@options
class BatchOptions:
    """`reward_model.reward_kwargs` of `batch`."""

    batch_size: Count | None = key("Most rows of a batch. Null: all that wait.", default=None)
    max_wait: NonNegative = key("How long the first row of a batch waits for others.", default=0.05, unit="s")


class BatchScorer(BoundedScorer):
    """Calls a scorer for several rows at once; `timeout` applies to each call."""

    def __init__(self, scorer: Scorer, timeout: float, given: BatchOptions) -> None:
        super().__init__(scorer, timeout)
        self._given = given
        self._waiting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Waiting] = weakref.WeakKeyDictionary()
        self._calls: set[asyncio.Task[None]] = set()

    async def _run(self, arguments: dict[str, Any]) -> Score:
        loop = asyncio.get_running_loop()
        waiting = self._waiting.setdefault(loop, [])
        future: asyncio.Future[Score] = loop.create_future()
        waiting.append((arguments, future))
        if len(waiting) == self._given.batch_size:
            self._flush(loop)
        elif len(waiting) == 1:
            loop.call_later(self._given.max_wait, self._flush, loop, future)
        return await future

    def _flush(self, loop: asyncio.AbstractEventLoop, first: asyncio.Future[Score] | None = None) -> None:
        """Scores the waiting rows; when called by a timer, only if `first` is still waiting."""
        waiting = self._waiting.get(loop, [])
        if not waiting or (first is not None and waiting[0][1] is not first):
            return
        self._waiting[loop] = []
        task = loop.create_task(self._score([each for each in waiting if not each[1].done()]))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _score(self, rows: Waiting) -> None:
        try:
            results = await self._results([arguments for arguments, _ in rows]) if rows else []
        except Exception as error:
            results = [error] * len(rows)
        for (_, future), result in zip(rows, results):
            set_outcome(future, result)

    async def _results(self, rows: Sequence[dict[str, Any]]) -> list[Any]:
        if not getattr(user_function(self.scorer), "batched", False):
            return await gather(self._one(row) for row in rows)
        lists = {many: [row.get(one) for row in rows] for many, one in BATCH_ARGUMENTS.items()}
        returned: Any = await super()._run(lists)
        results = list(returned.tolist() if hasattr(returned, "tolist") else returned)
        if len(results) != len(rows):
            raise InfrastructureError(f"it returned {len(results)} scores for {len(rows)} rows")
        return results

    async def _one(self, row: dict[str, Any]) -> Any:
        try:
            return await super()._run(row)
        except Exception as error:  # fails this row only
            return error


@register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Options in `reward_kwargs`: `batch_size` (null: all waiting rows) and `max_wait` in seconds (0.05)."""

    takes_batches, runs = True, (BatchScorer, BatchOptions)
