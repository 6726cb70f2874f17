"""`LossScale`: normalises a micro-batch's loss by the counts of the whole mini-batch, on any rank.

Invariant: the losses of all micro-batches and ranks add up to the loss of the whole mini-batch, however it was split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from etude.algorithms import loss_count
from etude.metrics import Max, Mean, Metric, Metrics, Pooled
from etude.protocol import DataProto


@dataclass(frozen=True)
class LossScale:
    """Counts of the whole mini-batch for `agg_loss`, and the aggregation mode."""

    batch_num_tokens: float
    global_batch_size: float
    loss_agg_mode: str = "token-mean"

    @classmethod
    def of(cls, batch: DataProto, loss_agg_mode: str) -> LossScale:
        """Reads the counts from the meta_info of `batch` (`count_scored` of the whole mini-batch); without them, counts
        `batch` itself."""
        counts = count_scored(batch) | batch.meta_info
        return cls(counts["batch_num_tokens"], counts["global_batch_size"], loss_agg_mode)

    def counts(self, micro: DataProto) -> dict[str, Any]:
        """Returns the arguments of `agg_loss` for the micro-batch `micro`."""
        return {
            "batch_num_tokens": self.batch_num_tokens,
            "global_batch_size": self.global_batch_size,
            "rollout_tokens": micro.batch.get("rollout_tokens", None),
        }

    def as_mean(self, part: Tensor, response_mask: Tensor) -> Mean:
        """Converts a micro-batch's part of a loss to a `Mean`; the parts add up to the mini-batch's loss, weighted by its
        divisor."""
        count = loss_count(self.loss_agg_mode, self.batch_num_tokens, self.global_batch_size)
        value, tokens = torch.stack([part.detach().double(), response_mask.sum().double()]).tolist()  # one wait
        return Mean(value * count, count * tokens / max(self.batch_num_tokens, 1.0))


def count_scored(batch: DataProto, main_rows: Tensor | None = None) -> dict[str, float]:
    """Counts scored tokens, and rollouts that have any: the divisors of a loss over the whole `batch`.

    With `main_rows` (rows,), true where a rollout starts, adds the column `rollout_tokens`: the scored tokens of each row's
    rollout. Without it, each row is a rollout.
    """
    tokens = batch.batch["response_mask"].sum(dim=1)
    if main_rows is not None:
        rollout = main_rows.long().cumsum(dim=0) - 1
        of_rollouts = torch.zeros_like(tokens).index_add(0, rollout, tokens)
        batch.batch["rollout_tokens"], tokens = of_rollouts[rollout], of_rollouts
    return {"batch_num_tokens": float(tokens.sum()), "global_batch_size": float((tokens > 0).sum())}


# (log_probs, entropy, micro-batch, scale) → a loss, to be added up over micro-batches, and metrics (plain numbers are means
# over the micro-batch's scored tokens). A micro-batch with `teacher_topk_ids` also has the column `topk_log_probs`, the
# log-probs of these ids (rows, response_len, k), with a gradient. With a critic on the trunk it also has `vpreds` (rows,
# response_len), with a gradient.
MicroLoss = Callable[[Tensor, Tensor, DataProto, LossScale], "tuple[Tensor, Mapping[str, Metric]]"]


def weigh(metrics: Mapping[str, Metric], response_mask: Tensor) -> Metrics:
    """Turns a micro-batch's plain numbers into means over its scored tokens; keeps the other metrics."""
    weight = float(response_mask.sum())
    return {name: m if isinstance(m, Mean | Max | Pooled) else Mean(m * weight, weight) for name, m in metrics.items()}
