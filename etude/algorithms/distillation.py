"""On-policy distillation: the teacher's log-prob of each sampled token as an advantage, or its distribution as a target."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.algorithms.aggregation import masked_mean
from etude.metrics import Mean

_MIN_TAIL = 1e-6  # below this, 1 − Σ p in float32 is only rounding
ABSENT = -1e30
"""Marks a missing log-prob: the teacher returned fewer than k tokens, or does not score the row."""


def distill(
    advantages: Tensor,
    *,
    teacher_log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    coef: float,
    task_coef: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """Returns coef · (log π_T − log π_old) + task_coef · `advantages` on sampled tokens, 0 elsewhere; all tensors are
    (batch, response_len). Where `teacher_log_probs` are `ABSENT`, the first term is 0.

    The first term is the negative per-token reverse KL, KL(π || π_T), estimated from samples of π (K. Lu, Thinking Machines
    Lab, "On-policy distillation", 2025; the on-policy case of arXiv 2306.13649). Rewards of later tokens do not count
    towards earlier ones. Computed in float64, returned in the dtype of `advantages`.

    Returns:
        The advantages, and `distillation/reverse_kl`: the mean of log π_old − log π_T over the sampled tokens that the
        teacher scored.
    """
    mask = response_mask > 0
    scored = mask & (teacher_log_probs > ABSENT / 2)
    gain = torch.where(scored, teacher_log_probs.double() - old_log_probs.double(), 0.0)
    mixed = torch.where(mask, coef * gain + task_coef * advantages.double(), 0.0)
    return mixed.to(advantages.dtype), {"distillation/reverse_kl": -float(masked_mean(gain, scored))}


def forward_kl_topk(
    log_probs: Tensor, teacher_log_probs: Tensor, response_mask: Tensor
) -> tuple[Tensor, dict[str, Mean]]:
    """Computes Σ_i p_i (log p_i − log q_i) + p_tail (log p_tail − log q_tail) per token, where p and q are the teacher's and
    the policy's probabilities of the teacher's top-k tokens, and p_tail = 1 − Σ_i p_i and q_tail those of all other tokens
    together.

    This is the KL of two distributions over k + 1 outcomes, so it is ≥ 0, 0 only if the policy agrees on all of them, and at
    most the KL over the vocabulary (supervised GKD with forward KL, arXiv 2306.13649; the tail: arXiv 2608.14728, TRL's
    `loss_add_tail`). Without the tail (verl's `forward_kl_topk`) the sum is negative where the policy puts more mass on the
    teacher's tokens than the teacher does; renormalised over the k tokens, it ignores that mass.

    Args:
        log_probs: (batch, response_len, k) of the policy.
        teacher_log_probs: the same for the teacher; `ABSENT` where it returned fewer tokens.
        response_mask: (batch, response_len).

    Returns:
        (batch, response_len) losses, 0 where masked, with a gradient to `log_probs`; and the metrics
        `distillation/forward_kl`, `teacher_mass` and `student_mass`, the means of the loss, Σ p_i and Σ q_i over the
        tokens that the teacher scored.
    """
    mask = response_mask > 0
    given = (teacher_log_probs > ABSENT / 2) & mask[..., None]
    ours, theirs = (torch.where(given, x, 0.0).to(log_probs.dtype) for x in (log_probs, teacher_log_probs))
    q_mass, p_mass = ((x.exp() * given).sum(dim=-1) for x in (ours, theirs))
    q_tail, p_tail = ((1 - mass).clamp(min=_MIN_TAIL) for mass in (q_mass, p_mass))
    top = (given * theirs.exp() * (theirs - ours)).sum(dim=-1)
    losses = torch.where(mask, top + p_tail * (p_tail.log() - q_tail.log()), 0.0)
    with torch.no_grad():
        means = {"forward_kl": losses, "teacher_mass": p_mass, "student_mass": q_mass}
        scored = given.any(dim=-1)
        sums = [torch.where(scored, each, 0.0).sum(dtype=torch.float64) for each in means.values()]
        *totals, count = torch.stack([*sums, scored.sum(dtype=torch.float64)]).tolist()  # one wait for a GPU
        return losses, {f"distillation/{name}": Mean(total, int(count)) for name, total in zip(means, totals)}
