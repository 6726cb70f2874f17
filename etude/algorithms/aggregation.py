"""Loss aggregation: from per-token losses to a scalar.

The `seq-mean-…` modes average over rollouts: a rollout with several sequences counts once, as if its tokens were in one
sequence.

Invariant: given `batch_num_tokens`, `global_batch_size` and `rollout_tokens` of the whole mini-batch, the sum of the results
over micro-batches (and the mean over data-parallel ranks) does not depend on how the mini-batch was split, nor on how
rollouts are split into sequences. Rollouts without a scored token do not count.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from etude.algorithms.records import LossAggMode
from etude.errors import ConfigError
from etude.registry import did_you_mean

LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar mean of `values` where `mask` is 1; 0 for an empty mask. Masked values have no effect, even if non-finite."""
    counts = mask > 0
    return torch.where(counts, values, 0.0).sum() / counts.sum().clamp(min=1)


def equal_scores(scores: Tensor) -> bool:
    """Whether the scores (n,) of one group are equal up to rounding: max − min ≤ max(1e-6, 1e-8 · max |score|).

    With the KL penalty in the reward, scores include the rounding of log-probs: about 1e-7 per token in float32.
    """
    return bool(scores.max() - scores.min() <= max(1e-6, 1e-8 * float(scores.abs().max())))


def loss_count(loss_agg_mode: str, tokens: float, rollouts: float) -> float:
    """Returns the divisor of a mini-batch's loss in this mode: its scored tokens, its rollouts, or 1."""
    if loss_agg_mode == "token-sum":
        return 1.0
    return tokens if loss_agg_mode == "token-mean" else rollouts


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    rollout_tokens: Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Aggregates per-token losses to a scalar.

    Args:
        loss_mat: (batch, response_len).
        loss_mask: (batch, response_len), 1 for tokens that count.
        loss_agg_mode: `token-mean` (DAPO, arXiv 2503.14476, eq. 8), `token-sum`, `seq-mean-token-sum` (Dr. GRPO, arXiv
            2503.20783), `seq-mean-token-sum-norm` (the same divided by `loss_scale_factor`, by default the width),
            `seq-mean-token-mean` (GRPO, arXiv 2402.03300, eq. 3).
        dp_size: data-parallel ranks whose results will be averaged.
        batch_num_tokens: tokens of the whole mini-batch over all ranks (default: this mask's).
        global_batch_size: rollouts of the whole mini-batch over all ranks (default: this mask's non-empty rows).
        rollout_tokens: (batch,) scored tokens of the rollout that a row belongs to, over all ranks (default: the row's).

    Raises:
        ConfigError: the mode is unknown.
    """
    mask = loss_mask > 0
    # where() instead of a product, so that a masked infinity does not become NaN.
    losses = torch.where(mask, loss_mat, 0.0)
    rollouts = float(mask.any(dim=-1).sum()) if global_batch_size is None else global_batch_size
    if loss_agg_mode == "token-mean":
        tokens = float(mask.sum()) if batch_num_tokens is None else batch_num_tokens
        return losses.sum() / max(tokens, 1.0) * dp_size
    if loss_agg_mode == "token-sum":
        return losses.sum() * dp_size
    if loss_agg_mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        loss = losses.sum() / max(rollouts, 1.0) * dp_size
        return loss if loss_agg_mode == "seq-mean-token-sum" else loss / (loss_scale_factor or loss_mask.shape[-1])
    if loss_agg_mode == "seq-mean-token-mean":
        lengths = mask.sum(dim=-1) if rollout_tokens is None else rollout_tokens
        return (losses.sum(dim=-1) / lengths.clamp(min=1)).sum() / max(rollouts, 1.0) * dp_size
    raise ConfigError(f"unknown loss_agg_mode '{loss_agg_mode}'{did_you_mean(loss_agg_mode, LOSS_AGG_MODES)}")
