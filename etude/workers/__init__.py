"""The roles as workers: policy (actor, rollout, reference), critic, reward."""

from etude.options import ActorOptions, CriticOptions, CustomRewardOptions, ModelOptions, RefOptions, RewardOptions
from etude.workers.critic import CriticWorker
from etude.workers.options import RoleOptions
from etude.workers.policy import ActorRolloutRefWorker
from etude.workers.reward import RewardWorker, build_scorer

__all__ = [
    "ActorOptions",
    "ActorRolloutRefWorker",
    "CriticOptions",
    "CriticWorker",
    "CustomRewardOptions",
    "ModelOptions",
    "RefOptions",
    "RewardOptions",
    "RewardWorker",
    "RoleOptions",
    "build_scorer",
]
