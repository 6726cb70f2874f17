"""Mismatch between the sampling engine and the trained model."""

from __future__ import annotations

from torch import Tensor

from etude.metrics import Max, Mean, Metrics


def rollout_mismatch(log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> Metrics:
    """`training/rollout_probs_diff_{mean,max}`: difference between the actor's and the engine's probabilities of the sampled
    tokens; tensors are (batch, response_len).

    More than rounding means that actor and engine do not run the same model on the same context, or that the engine sampled
    from a restricted distribution (`top_p`, `top_k`).
    """
    mask = response_mask > 0
    actor, engine = log_prob.detach()[mask].double(), rollout_log_prob[mask].double()
    if not len(actor):
        return {}
    difference = (actor.exp() - engine.exp()).abs()
    name = "training/rollout_probs_diff"
    return {f"{name}_mean": Mean(float(difference.sum()), len(difference)), f"{name}_max": Max(float(difference.max()))}
