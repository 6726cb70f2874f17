"""Scoring: what a finished rollout is worth. Pure scorers by data source, reward managers, the trajectory scorer."""

from etude.rewards.default import SCORERS, Score, Scorer, compute_score, load_compute_score
from etude.rewards.manager import (
    REWARD_MANAGERS,
    AbstractRewardManager,
    NaiveRewardManager,
    RewardManagerBase,
    RewardResult,
    register,
)
from etude.rewards.scoring import TrajectoryScorer, duplicate_judge

__all__ = [
    "REWARD_MANAGERS",
    "SCORERS",
    "AbstractRewardManager",
    "NaiveRewardManager",
    "RewardManagerBase",
    "RewardResult",
    "Score",
    "Scorer",
    "TrajectoryScorer",
    "compute_score",
    "duplicate_judge",
    "load_compute_score",
    "register",
]
