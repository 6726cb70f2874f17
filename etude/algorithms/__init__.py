"""Pure tensor functions: advantage estimators, policy losses, KL penalties, loss aggregation; and records of what they need.
Functions are imported lazily, because checking a configuration needs the records but not torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from etude.algorithms.records import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    Estimator,
    PolicyLoss,
    register_estimator,
    register_policy_loss,
)

if TYPE_CHECKING:
    from etude.algorithms.advantages import compute_advantage
    from etude.algorithms.aggregation import LOSS_AGG_MODES, agg_loss, equal_scores, loss_count, masked_mean
    from etude.algorithms.correction import (
        center_scores,
        importance_weights,
        off_policy_sequence_mask,
        rejection_mask,
        rollout_mismatch,
    )
    from etude.algorithms.distillation import distill, forward_kl_topk
    from etude.algorithms.kl import adapt_kl_coef, apply_kl_penalty, kl_penalty
    from etude.algorithms.losses import policy_loss, value_loss
    from etude.algorithms.preference import preference_loss

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "Estimator",
    "PolicyLoss",
    "adapt_kl_coef",
    "agg_loss",
    "apply_kl_penalty",
    "center_scores",
    "compute_advantage",
    "distill",
    "equal_scores",
    "forward_kl_topk",
    "importance_weights",
    "kl_penalty",
    "loss_count",
    "masked_mean",
    "off_policy_sequence_mask",
    "policy_loss",
    "preference_loss",
    "register_estimator",
    "register_policy_loss",
    "rejection_mask",
    "rollout_mismatch",
    "value_loss",
]

_HOMES = {
    "advantages": {"compute_advantage"},
    "aggregation": {"LOSS_AGG_MODES", "agg_loss", "equal_scores", "loss_count", "masked_mean"},
    "correction": {
        "center_scores",
        "importance_weights",
        "off_policy_sequence_mask",
        "rejection_mask",
        "rollout_mismatch",
    },
    "distillation": {"distill", "forward_kl_topk"},
    "kl": {"adapt_kl_coef", "apply_kl_penalty", "kl_penalty"},
    "losses": {"policy_loss", "value_loss"},
    "preference": {"preference_loss"},
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
