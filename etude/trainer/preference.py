"""One step of direct preference optimisation (DPO), with the same workers as supervised fine-tuning.

The loss of a pair is not linear in its log-probs, so its gradient takes two passes: the first computes log-probs, which give
each pair a weight; the second takes the gradient of the weighted log-probs, which can be split over micro-batches and ranks
in any way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etude.algorithms import preference_loss
from etude.data.dumped import Sequences
from etude.distributed import WorkerGroup
from etude.metrics import add_metrics, finish_metrics
from etude.trainer.minibatches import rank_parts
from etude.training import demonstrations_to_batch

Pair = tuple[Sequences, Sequences]  # sequences of the chosen rollout, sequences of the rejected one


def preference_step(
    actor: WorkerGroup, pairs: Sequence[Pair], *, beta: float, pad_token_id: int, step: int
) -> dict[str, float]:
    """Takes one optimizer step on the mean loss of `pairs`. Returns metrics `dpo/*`: `loss`, `margin` (mean β (Δ_chosen −
    Δ_rejected), 0 at the start), `accuracy` (share of pairs with a margin above 0), `chosen` and `rejected` (mean β Δ), and
    those of `update_sft`."""
    owned = [
        (2 * number + side, sequence)
        for number, pair in enumerate(pairs)
        for side, rollout in enumerate(pair)
        for sequence in rollout
    ]
    batch = demonstrations_to_batch([sequence for _, sequence in owned], pad_token_id)
    batch.meta_info |= {"temperature": 1.0, "global_step": step, "in_update": True}
    policy = actor.compute_log_prob(batch).batch["old_log_probs"]
    reference = actor.compute_ref_log_prob(batch).batch["ref_log_prob"]
    owners = torch.tensor([owner for owner, _ in owned])
    ratios = torch.zeros(2 * len(pairs), dtype=torch.float64)
    ratios.index_add_(0, owners, (policy.double() - reference.double()).sum(dim=1))
    chosen, rejected = ratios.view(-1, 2).unbind(dim=1)
    losses, weights = preference_loss(chosen, rejected, beta)
    signed = torch.stack([weights, -weights], dim=1).flatten() / len(pairs)
    batch.batch["token_weights"] = signed[owners][:, None] * batch.batch["response_mask"]
    metrics = finish_metrics(add_metrics(actor.update_sft(rank_parts(batch, actor.world_size))))
    margins = beta * (chosen - rejected)
    return {f"dpo/{name.removeprefix('sft/')}": value for name, value in metrics.items()} | {
        "dpo/loss": float(losses.mean()),
        "dpo/margin": float(margins.mean()),
        "dpo/accuracy": float((margins > 0).double().mean()),
        "dpo/chosen": beta * float(chosen.mean()),
        "dpo/rejected": beta * float(rejected.mean()),
    }
