"""Pure tensor functions: advantage estimators, policy losses, KL penalties, aggregation."""

from etude.algorithms.advantages import ADVANTAGE_ESTIMATORS, compute_advantage
from etude.algorithms.aggregation import LOSS_AGG_MODES, agg_loss, equal_scores, loss_count, masked_mean
from etude.algorithms.kl import KLController, kl_penalty
from etude.algorithms.losses import POLICY_LOSSES, policy_loss, value_loss
from etude.algorithms.mismatch import rollout_mismatch

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "KLController",
    "agg_loss",
    "compute_advantage",
    "equal_scores",
    "kl_penalty",
    "loss_count",
    "masked_mean",
    "policy_loss",
    "rollout_mismatch",
    "value_loss",
]
