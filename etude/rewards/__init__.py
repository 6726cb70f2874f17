"""Rewards of finished rollouts: pure scorers by data source, reward managers, and the trajectory scorer."""

from etude.rewards.batch import BatchRewardManager
from etude.rewards.dapo import DAPORewardManager
from etude.rewards.default import COMPONENTS, SCORERS, Score, Scorer, compute_score
from etude.rewards.manager import (
    REWARD_MANAGERS,
    AbstractRewardManager,
    NaiveRewardManager,
    RewardManagerBase,
    RewardResult,
    build_manager,
    register,
)
from etude.rewards.pools import PrimeRewardManager, RemoteRewardManager
from etude.rewards.scoring import AsyncScorer, TrajectoryScorer, duplicate_judge, score_rollout
from etude.rewards.throttled import RateLimitedRewardManager
from etude.rewards.user_functions import load_compute_score, load_named, load_rewards
from etude.rewards.view import TrajectoryView

BUILTIN_MANAGERS = ("naive", "batch", "prime", "dapo", "gdpo", "rate_limited", "remote")
"""Managers that score by the row's data source."""
default_compute_score = compute_score  # its name in verl.utils.reward_score

__all__ = [
    "BUILTIN_MANAGERS",
    "COMPONENTS",
    "REWARD_MANAGERS",
    "SCORERS",
    "AbstractRewardManager",
    "AsyncScorer",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RateLimitedRewardManager",
    "RemoteRewardManager",
    "RewardManagerBase",
    "RewardResult",
    "Score",
    "Scorer",
    "TrajectoryScorer",
    "TrajectoryView",
    "build_manager",
    "compute_score",
    "default_compute_score",
    "duplicate_judge",
    "load_compute_score",
    "load_named",
    "load_rewards",
    "register",
    "score_rollout",
]
