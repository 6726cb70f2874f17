"""The reward role: scores finished trajectories, one by one as they end or a batch at a time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from etude.agents.batch import BY_GROUP, rows_of
from etude.bounded import gather
from etude.distributed import register
from etude.errors import InfrastructureError, one_line
from etude.protocol import DataProto
from etude.rewards import (
    Scorer,
    TrajectoryScorer,
    build_manager,
    load_compute_score,
    load_rewards,
    score_rollout,
)
from etude.trajectory import Rollout
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
    function: Scorer | None = load_rewards(custom.rewards) if custom.rewards else None
    if custom.path:
        function = load_compute_score(custom.path, custom.name, dict(custom.reward_kwargs))
    manager = build_manager(
        options.reward.reward_manager,
        config=options.user_config(),
        tokenizer=tokenizer,
        compute_score=function,
        reward_kwargs=options.reward.reward_kwargs,
        score_text=options.reward.score_text,
    )
    return TrajectoryScorer(manager)


class RewardWorker(RoleWorker):
    """Scores batches: for lock-step rollouts (`rollout.mode=sync`) and for re-scoring."""

    def __init__(self, options: RoleOptions, **place: Any) -> None:
        super().__init__(options, **place)
        self._scorer = build_scorer(options, self.tokenizer)

    @register(dispatch_mode=BY_GROUP)
    def compute_scores(self, data: DataProto) -> DataProto:
        """Scores the trajectories of column `rollout`, in place of their earlier scores; returns that column."""
        rollouts: list[Rollout] = data.non_tensor_batch["rollout"].tolist()
        if self._scorer is not None:
            asyncio.run(self._score_all(rollouts, rows_of(data), self._scorer))
        return DataProto.from_single_dict({"rollout": rollouts})

    async def _score_all(self, rollouts: list[Rollout], rows: list[dict[str, Any]], scorer: TrajectoryScorer) -> None:
        retries, timeout = self.options.rollout.infrastructure_retries, self.options.rollout.trajectory_timeout
        await gather(
            score_rollout(rollout, row, scorer, retries=retries, timeout=timeout, on_failure=_log_failure)
            for rollout, row in zip(rollouts, rows)
        )


def _log_failure(request_id: str, error: InfrastructureError) -> None:
    logger.warning("trajectory %s: %s", request_id, one_line(error))
