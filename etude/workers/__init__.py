"""The workers, one class per role: rollout, actor with reference, critic, reward, teacher; and actor and rollout in one."""

from etude.workers.actor import TrainWorker
from etude.workers.critic import CriticWorker
from etude.workers.reward import RewardWorker, build_scorer
from etude.workers.role import RoleWorker
from etude.workers.rollout import ActorRolloutRefWorker, RolloutWorker
from etude.workers.teacher import TeacherWorker
from etude.workers.weight_chunks import sync_weights

__all__ = [
    "ActorRolloutRefWorker",
    "CriticWorker",
    "RewardWorker",
    "RoleWorker",
    "RolloutWorker",
    "TeacherWorker",
    "TrainWorker",
    "build_scorer",
    "sync_weights",
]
