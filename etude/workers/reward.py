"""The reward role: scores finished trajectories, one by one as they end or a batch at a time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np

from etude.agents import RolloutResult, score_result
from etude.agents.batch import rows_of
from etude.bounded import settle
from etude.distributed import Dispatch, register
from etude.errors import InfrastructureError, one_line
from etude.protocol import DataProto
from etude.rewards import TrajectoryScorer, build_manager, load_compute_score
from etude.workers.options import RoleOptions
from etude.workers.role import RoleWorker

logger = logging.getLogger(__name__)


def build_scorer(options: RoleOptions, tokenizer: Any) -> TrajectoryScorer | None:
    """The scorer that the configuration asks for; None with `reward_model.enable=false`.

    Raises:
        ConfigError: unknown reward manager, one that cannot be made, or a custom function that cannot be loaded.
    """
    if not options.reward.enable:
        return None
    custom = options.custom_reward
    function = load_compute_score(custom.path, custom.name, dict(custom.reward_kwargs)) if custom.path else None
    manager = build_manager(
        options.reward.reward_manager,
        config=options.user_config(),
        tokenizer=tokenizer,
        compute_score=function,
        reward_kwargs=options.reward.reward_kwargs,
    )
    return TrajectoryScorer(manager)


class RewardWorker(RoleWorker):
    """Scores batches: for lock-step rollouts (`rollout.mode=sync`) and for re-scoring."""

    def __init__(self, options: RoleOptions, **place: Any) -> None:
        super().__init__(options, **place)
        self._scorer = build_scorer(options, self.tokenizer)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_scores(self, data: DataProto) -> DataProto:
        """Scores the trajectories of column `rollout`, in place of their earlier scores; returns that column."""
        results: list[RolloutResult] = data.non_tensor_batch["rollout"].tolist()
        if self._scorer is not None:
            asyncio.run(self._score_all(results, rows_of(data)))
        column = np.empty(len(results), dtype=object)
        column[:] = results
        return DataProto.from_single_dict({"rollout": column})

    async def _score_all(self, results: list[RolloutResult], rows: list[dict[str, Any]]) -> None:
        scorings = [asyncio.ensure_future(self._score(result, row)) for result, row in zip(results, rows)]
        try:
            await asyncio.gather(*scorings)
        finally:
            await settle(scorings)

    async def _score(self, result: RolloutResult, row: dict[str, Any]) -> None:
        assert self._scorer is not None
        await score_result(
            result,
            row,
            self._scorer,
            retries=self.options.rollout.infrastructure_retries,
            timeout=self.options.rollout.trajectory_timeout,
            on_failure=_log_failure,
        )


def _log_failure(request_id: str, error: InfrastructureError) -> None:
    logger.warning("trajectory %s: %s", request_id, one_line(error))
