"""The reward manager `batch`: one call for many trajectories, for functions that gain by it (a model's forward pass).

A function that declares `solution_strs` gets lists, as in verl: `data_sources, solution_strs, ground_truths, extra_infos`,
and `trajectories`; it returns a list of numbers or dicts. Another is called for each row of a batch at once.

Each batch holds what has ended by the time that it is `batch_size`, or `max_wait` seconds after its first: with
`rollout.mode=sync` all trajectories, otherwise those that ended together. Where rows do not gain by it, `naive` is better:
it waits for nobody.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import Any

from etude.bounded import gather, set_outcome
from etude.errors import InfrastructureError
from etude.options.declare import key, options
from etude.options.types import Count, NonNegative
from etude.rewards.default import BATCH_ARGUMENTS, Score, Scorer, user_function
from etude.rewards.manager import BoundedScorer, NaiveRewardManager, register

Waiting = list[tuple[dict[str, Any], asyncio.Future[Score]]]


@options
class BatchOptions:
    """`reward_model.reward_kwargs` of `batch`."""

    batch_size: Count | None = key("Most rows of a batch. Null: all that wait.", default=None)
    max_wait: NonNegative = key("How long the first row of a batch waits for others.", default=0.05, unit="s")


class BatchScorer(BoundedScorer):
    """A scorer that is called for several rows at once; `timeout` is that of the call."""

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
        """Scores what waits; as a timer only if `first` still waits."""
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
        if not getattr(user_function(self._scorer), "batched", False):
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
        except Exception as error:  # of this row alone
            return error


@register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Its `reward_kwargs`: `batch_size` (null: all that wait) and `max_wait` seconds (0.05)."""

    takes_batches, runs = True, (BatchScorer, BatchOptions)
