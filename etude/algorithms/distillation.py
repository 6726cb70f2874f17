"""On-policy distillation: the teacher's verdict on each sampled token as an advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.algorithms.aggregation import masked_mean


def distill(
    advantages: Tensor,
    *,
    teacher_log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    coef: float,
    task_coef: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """coef · (log π_T − log π_old) + task_coef · `advantages` on sampled tokens, 0 elsewhere; (batch, response_len) all.

    The first term is the negative per-token reverse KL, KL(π || π_T), of a sample of π (K. Lu, Thinking Machines Lab,
    "On-policy distillation", 2025; the on-policy case of arXiv 2306.13649). Rewards of later tokens do not count towards
    earlier ones. Computed in float64, returned in the type of `advantages`.

    Returns:
        The advantages, and `distillation/reverse_kl`: the mean of log π_old − log π_T over the sampled tokens.
    """
    mask = response_mask > 0
    gain = torch.where(mask, teacher_log_probs.double() - old_log_probs.double(), 0.0)
    mixed = torch.where(mask, coef * gain + task_coef * advantages.double(), 0.0)
    return mixed.to(advantages.dtype), {"distillation/reverse_kl": -float(masked_mean(gain, mask))}
