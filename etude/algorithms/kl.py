"""KL penalties between the policy and a reference, whose log-probs `etude.workers.actor` computes, and the adaptive KL
coefficient.

All estimators estimate KL(π || π_ref) from samples of π (J. Schulman, "Approximating KL divergence", 2020).
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from etude.algorithms.aggregation import masked_mean
from etude.algorithms.records import KLKind
from etude.errors import ConfigError
from etude.registry import did_you_mean

_MAX_K3 = 10.0
_K3_BOUNDS = -2.6108686381498756, 10.999983298020254  # the d at which exp(−d) − 1 + d equals _MAX_K3


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """Computes the penalty per token, (batch, response_len) like the inputs.

    With d = log_prob − ref_log_prob: `kl`/`k1` is d, `abs` is |d|, `mse`/`k2` is d²/2, `low_var_kl`/`k3` is exp(−d) − 1 + d,
    with d clipped to ±20 and the result to 10 against overflow. Where the result is clipped, the gradient is that at the
    bound, so that a policy far from its reference is still pulled back. A trailing `+` keeps the value but uses the gradient
    of `k2`, which is unbiased; that of `k1` is 0 in expectation.

    Raises:
        ConfigError: the kind is unknown.
    """
    base = kind.removesuffix("+")
    difference = log_prob - ref_log_prob
    if base in ("kl", "k1"):
        value = difference
    elif base == "abs":
        value = difference.abs()
    elif base in ("mse", "k2"):
        value = 0.5 * difference.square()
    elif base in ("low_var_kl", "k3"):
        value = _k3(difference)
    else:
        raise ConfigError(f"unknown kl_loss_type or kl_penalty '{kind}'{did_you_mean(kind, get_args(KLKind))}")
    if not kind.endswith("+"):
        return value
    surrogate = 0.5 * difference.square()
    return value.detach() + (surrogate - surrogate.detach())


def apply_kl_penalty(
    rewards: Tensor, log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, *, kind: str, kl_coef: float
) -> tuple[Tensor, float]:
    """Puts the KL penalty into the reward: returns `rewards` − kl_coef · penalty on the sampled tokens, computed in float64,
    and the penalty's mean over them.

    All tensors are (batch, response_len); `kind` as for `kl_penalty`.
    """
    penalty = kl_penalty(log_prob.double(), ref_log_prob.double(), kind)
    penalty = torch.where(response_mask > 0, penalty, 0.0)
    return rewards - kl_coef * penalty, float(masked_mean(penalty, response_mask))


def _k3(difference: Tensor) -> Tensor:
    bounded = difference.clamp(-20.0, 20.0)
    value = (torch.expm1(-bounded) + bounded).clamp(max=_MAX_K3)
    slope = -torch.expm1(-difference.detach().clamp(*_K3_BOUNDS))
    return value + torch.where(value.detach() < _MAX_K3, 0.0, slope) * (difference - difference.detach())


def adapt_kl_coef(kl_coef: float, current_kl: float, n_steps: int, *, target_kl: float, horizon: int) -> float:
    """Returns the updated coefficient of the adaptive KL controller, which steers towards `target_kl`, after `n_steps`
    trajectories with mean KL `current_kl` (arXiv 1909.08593, section 2.2)."""
    error = max(-0.2, min(0.2, current_kl / target_kl - 1))
    return kl_coef * (1 + error * n_steps / horizon)
