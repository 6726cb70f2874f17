"""Pure tensor functions: advantage estimators, policy losses, KL penalties, aggregation."""

from etude.algorithms.advantages import ADVANTAGE_ESTIMATORS, compute_advantage
from etude.algorithms.aggregation import LOSS_AGG_MODES, agg_loss, masked_mean
from etude.algorithms.kl import KLController, kl_penalty
from etude.algorithms.losses import POLICY_LOSSES, policy_loss, value_loss

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "KLController",
    "agg_loss",
    "compute_advantage",
    "kl_penalty",
    "masked_mean",
    "policy_loss",
    "value_loss",
]
