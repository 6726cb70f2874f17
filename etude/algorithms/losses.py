"""Policy and value losses as pure functions of log-probs, advantages and values.

Invariant: no label, log-prob, advantage or value at a masked position reaches the loss or its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from etude.algorithms.aggregation import agg_loss, masked_mean
from etude.algorithms.records import POLICY_LOSSES
from etude.errors import ConfigError


def policy_loss(
    name: str,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    **options: Any,
) -> tuple[Tensor, dict[str, float]]:
    """The loss registered as `name`; tensors are (batch, response_len), the result a scalar and its metrics, each a mean
    over the mask. Advantages are cast to the dtype of `log_prob`.

    `options` go to the loss: its own, the columns that it needs, and those that `agg_loss` takes (`dp_size`,
    `batch_num_tokens`, `global_batch_size`, `loss_scale_factor`, `rollout_is_weights`), which it passes on.

    Raises:
        ConfigError: unknown loss or aggregation mode.
    """
    found: tuple[Tensor, dict[str, float]] = POLICY_LOSSES.get(name)(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages.to(log_prob.dtype),
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        **options,
    )
    return found


def vanilla(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
    **scaling: Any,
) -> tuple[Tensor, dict[str, float]]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO) and, for negative advantages, the
    dual clip at `clip_ratio_c` (arXiv 1912.09729, eq. 5). `clip_ratio` fills in for a bound that is None.

    Raises:
        ConfigError: `clip_ratio_c` is not greater than 1: it would cut off the gradient of the sampling policy itself.
    """
    low = clip_ratio if clip_ratio_low is None else clip_ratio_low
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    if clip_ratio_c <= 1:
        raise ConfigError(f"actor.clip_ratio_c must be greater than 1, not {clip_ratio_c}")
    mask = response_mask.bool()
    # Masked positions get a log-ratio of exactly 0, so that their values have no effect.
    log_ratio = torch.where(mask, log_prob - old_log_prob, torch.zeros_like(log_prob)).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    pessimistic = torch.maximum(unclipped, clipped)
    dual = torch.minimum(pessimistic, -advantages * clip_ratio_c)
    losses = torch.where(advantages < 0, dual, pessimistic)
    with torch.no_grad():
        metrics = {
            "actor/pg_clipfrac": float(masked_mean((clipped > unclipped).double(), mask)),
            "actor/pg_clipfrac_lower": float(masked_mean(((dual < pessimistic) & (advantages < 0)).double(), mask)),
            "actor/ppo_kl": float(masked_mean(-log_ratio, mask)),
        }
    return agg_loss(losses, response_mask, loss_agg_mode, **scaling), metrics


def reinforce(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    **scaling: Any,
) -> tuple[Tensor, dict[str, float]]:
    """−A · log π (Williams 1992), without a ratio to the policy that sampled."""
    losses = -advantages * torch.where(response_mask > 0, log_prob, 0.0)
    metrics = {"actor/ppo_kl": float(masked_mean((old_log_prob - log_prob).detach(), response_mask))}
    return agg_loss(losses, response_mask, loss_agg_mode, **scaling), metrics


def value_loss(
    *,
    vpreds: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    **scaling: Any,
) -> tuple[Tensor, dict[str, float]]:
    """0.5 · max((v − R)², (clip(v, v_old ± c) − R)²), aggregated; the clipped value loss of the PPO implementations
    (Huang et al., "The 37 implementation details of PPO", 2022). Tensors are (batch, response_len)."""
    mask = response_mask.bool()
    vpreds, values, returns = (torch.where(mask, x.to(vpreds.dtype), 0.0) for x in (vpreds, values, returns))
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain, bounded = (vpreds - returns).square(), (clipped - returns).square()
    loss = 0.5 * agg_loss(torch.maximum(plain, bounded), response_mask, loss_agg_mode, **scaling)
    with torch.no_grad():
        metrics = {
            "critic/vf_clipfrac": float(masked_mean((bounded > plain).double(), mask)),
            "critic/vpred_mean": float(masked_mean(vpreds, mask)),
        }
    return loss, metrics
