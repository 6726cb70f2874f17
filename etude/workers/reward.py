"""The reward role: scores finished trajectories, one by one as they end or a batch at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from etude.agents import RolloutResult
from etude.agents.batch import rows_of
from etude.distributed import Dispatch, Worker, register
from etude.errors import is_infrastructure
from etude.protocol import DataProto
from etude.rewards import REWARD_MANAGERS, TrajectoryScorer, load_compute_score
from etude.rewards import compute_score as default_compute_score
from etude.trajectory import StopReason
from etude.workers.options import RoleOptions


def build_scorer(options: RoleOptions, tokenizer: Any) -> TrajectoryScorer | None:
    """The scorer that the configuration asks for; None with `reward_model.enable=false`.

    Raises:
        ConfigError: unknown reward manager, or a custom function that cannot be loaded.
    """
    if not options.reward.enable:
        return None
    custom = options.custom_reward
    function = (
        load_compute_score(custom.path, custom.name, dict(custom.reward_kwargs)) if custom.path else default_compute_score
    )
    manager: Any = REWARD_MANAGERS.get(options.reward.reward_manager)  # a user's class may take what it likes
    return TrajectoryScorer(manager(tokenizer, function, **dict(options.reward.reward_kwargs)))


class RewardWorker(Worker):
    """Scores batches: for lock-step rollouts (`rollout.mode=sync`) and for re-scoring."""

    def __init__(self, options: RoleOptions, tokenizer: Any, **place: Any) -> None:
        super().__init__(**place)
        self._scorer = build_scorer(options, tokenizer)
        self._retries = options.rollout.infrastructure_retries

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
        await asyncio.gather(*(self._score(result, row) for result, row in zip(results, rows)))

    async def _score(self, result: RolloutResult, row: dict[str, Any]) -> None:
        assert self._scorer is not None
        for _ in range(self._retries + 1):
            if result.trajectory is None:
                return
            try:
                return await self._scorer(result.trajectory, row)
            except Exception as error:
                if not is_infrastructure(error):
                    raise
                result.failures += 1
        result.trajectory, result.dropped = None, StopReason.INFRASTRUCTURE
