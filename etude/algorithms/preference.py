"""Direct preference optimisation: the loss of pairs of rollouts, one preferred to the other."""

from __future__ import annotations

import torch
from torch import Tensor


def preference_loss(chosen: Tensor, rejected: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7) of each pair: −log σ(margin), margin = β (Δ_chosen −
    Δ_rejected), where Δ is how much more probable a rollout is under the policy than under the reference.

    Args:
        chosen: (pairs,), Δ = Σ over the rollout's sampled tokens of log π − log π_ref, in nats.
        rejected: the same.

    Returns:
        (pairs,) losses and (pairs,) weights β σ(−margin): the gradient of the loss is −weight by Δ_chosen, and +weight by
        Δ_rejected. With them fixed, the loss is linear in log-probs, and a pair may be split over micro-batches and ranks.
    """
    margins = beta * (chosen - rejected)
    return -torch.nn.functional.logsigmoid(margins), beta * torch.sigmoid(-margins)
