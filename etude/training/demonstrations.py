"""Supervised fine-tuning on demonstrations with a provenance mask: only tokens that a policy would have sampled are trained
on.

A demonstration is tokenised exactly as a rollout of the same conversation would be (`ChatTemplate.demonstration`), so that
the policy later sees the same contexts as in training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from etude.algorithms import agg_loss
from etude.metrics import Metrics
from etude.protocol import DataProto
from etude.schemas import ImageInput
from etude.training.images import COLUMN
from etude.training.loss_scale import LossScale
from etude.training.policy import PolicyLearner
from etude.trajectory import Provenance

Demonstration = Sequence[tuple[Sequence[int], Provenance]]


def demonstrations_to_batch(
    examples: Sequence[Demonstration], pad_token_id: int, images: Sequence[Sequence[ImageInput]] = ()
) -> DataProto:
    """Builds a batch with right-padded `input_ids`, `attention_mask` and `response_mask` (1 on sampled tokens), each (batch,
    width); if any example has `images`, also the column `multi_modal_inputs`."""
    ids = [torch.tensor([t for run, _ in example for t in run], dtype=torch.long) for example in examples]
    masks = [
        torch.tensor([int(who is Provenance.SAMPLED) for run, who in example for _ in run], dtype=torch.long)
        for example in examples
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    return DataProto.from_single_dict(
        {
            "input_ids": pad(ids, batch_first=True, padding_value=pad_token_id),
            "attention_mask": pad([torch.ones_like(x) for x in ids], batch_first=True),
            "response_mask": pad(masks, batch_first=True),
        }
        | ({COLUMN: [tuple(each) for each in images]} if any(images) else {})
    )


def sft_step(engine: PolicyLearner, batch: DataProto) -> Metrics:
    """Takes one optimizer step on the mean negative log-likelihood per sampled token of a `demonstrations_to_batch` batch,
    or of a rank's part of it. With a column `token_weights` (batch, width), the loss is the weighted sum instead.

    Returns the metrics `loss`, `grad_norm`, `lr`, `weight_change`, `optimizer_steps`, `skipped_steps`.
    """

    def loss(log_probs: Tensor, _: Tensor, micro: DataProto, scale: LossScale) -> tuple[Tensor, dict[str, float]]:
        mask, weights = micro.batch["response_mask"], micro.batch.get("token_weights")
        if weights is not None:
            return -(log_probs * weights.to(log_probs.dtype)).sum(), {}
        return agg_loss(-log_probs, mask, "token-mean", batch_num_tokens=scale.batch_num_tokens), {}

    return engine.update(batch, loss, temperature=1.0)
