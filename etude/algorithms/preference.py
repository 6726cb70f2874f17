"""Direct preference optimisation (DPO): the loss of pairs of a chosen and a rejected rollout."""

from __future__ import annotations

import torch
from torch import Tensor


def preference_loss(chosen: Tensor, rejected: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """DPO loss of each pair (Rafailov et al. 2023, arXiv 2305.18290, equation 7): −log σ(margin), margin = β (Δ_chosen −
    Δ_rejected), where Δ is the log-ratio of a rollout under the policy and the reference.

    Args:
        chosen: (pairs,), Δ = Σ over the rollout's sampled tokens of log π − log π_ref, in nats.
        rejected: the same for the rejected rollouts.

    Returns:
        (pairs,) losses and (pairs,) weights β σ(−margin): the loss's gradient is −weight with respect to Δ_chosen and
        +weight with respect to Δ_rejected. With fixed weights the loss is linear in log-probs, so a pair can be split over
        micro-batches and ranks.
    """
    margins = beta * (chosen - rejected)
    return -torch.nn.functional.logsigmoid(margins), beta * torch.sigmoid(-margins)
