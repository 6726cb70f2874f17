"""Scoring: what a finished rollout is worth. Pure scorers by data source, reward managers, the trajectory scorer."""

from etude.rewards.dapo import DAPORewardManager
from etude.rewards.default import SCORERS, Score, Scorer, compute_score, load_compute_score
from etude.rewards.manager import (
    REWARD_MANAGERS,
    AbstractRewardManager,
    NaiveRewardManager,
    RewardManagerBase,
    RewardResult,
    build_manager,
    register,
)
from etude.rewards.scoring import AsyncScorer, TrajectoryScorer, duplicate_judge, score_rollout

default_compute_score = compute_score  # its name in verl.utils.reward_score

__all__ = [
    "REWARD_MANAGERS",
    "SCORERS",
    "AbstractRewardManager",
    "AsyncScorer",
    "DAPORewardManager",
    "NaiveRewardManager",
    "RewardManagerBase",
    "RewardResult",
    "Score",
    "Scorer",
    "TrajectoryScorer",
    "build_manager",
    "compute_score",
    "default_compute_score",
    "duplicate_judge",
    "load_compute_score",
    "register",
    "score_rollout",
]
