"""The roles as workers: rollout, actor with its reference, critic, reward, teacher; rollout and actor in one; and what runs
the trainer's functions on batches."""

from etude.models.named_weights import full_state
from etude.options import ActorOptions, CriticOptions, CustomRewardOptions, ModelOptions, RefOptions, RewardOptions
from etude.workers.actor import TrainWorker
from etude.workers.batches import BatchWorker
from etude.workers.critic import CriticWorker
from etude.workers.options import RoleOptions
from etude.workers.policy import ActorRolloutRefWorker
from etude.workers.reward import RewardWorker, build_scorer
from etude.workers.rollout import RolloutWorker
from etude.workers.teacher import TeacherWorker
from etude.workers.weights import sync_weights

__all__ = [
    "ActorOptions",
    "ActorRolloutRefWorker",
    "BatchWorker",
    "CriticOptions",
    "CriticWorker",
    "CustomRewardOptions",
    "ModelOptions",
    "RefOptions",
    "RewardOptions",
    "RewardWorker",
    "RoleOptions",
    "RolloutWorker",
    "TeacherWorker",
    "TrainWorker",
    "build_scorer",
    "full_state",
    "sync_weights",
]
