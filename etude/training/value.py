"""The critic's training engine: values of a batch, and gradient steps on a mini-batch. Packs rows like the policy's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from etude.algorithms import value_loss
from etude.metrics import Metrics, add_metrics
from etude.protocol import DataProto
from etude.training.loss_scale import LossScale, weigh
from etude.training.microbatches import Learner
from etude.training.optim import OptimizerSet, step_metrics
from etude.training.packing import PackedRows
from etude.training.sharding import run_forward
from etude.training.ulysses import SequenceTeam


class ValueLearner(Learner):
    """Trains a `ValueModel`, or a policy's `SharedValueHead`. A token's value is that of its context."""

    optimizer: OptimizerSet

    def __init__(
        self, model: Any, *, max_tokens: int, optimizer: OptimizerSet, team: SequenceTeam | None = None
    ) -> None:
        """See `Learner`."""
        super().__init__(model, model.backbone, max_tokens, optimizer, team)

    def _score(self, packed: PackedRows) -> Tensor:
        model = self.model
        return run_forward(model, lambda: packed.scatter(model.values_of(packed.hidden(model.backbone))))

    @torch.no_grad()
    def values(self, batch: DataProto) -> Tensor:
        """Returns values (batch, response_len) on the CPU; 0 where `response_mask` is 0."""
        self.model.eval()
        result = torch.zeros(batch.batch["response_mask"].shape, dtype=self.model.head.weight.dtype)
        for rows, packed in self._passes(batch):
            result[rows] = self._score(packed).cpu()
        return result

    def update(
        self,
        batch: DataProto,
        *,
        cliprange_value: float,
        loss_agg_mode: str,
        loss_scale_factor: float | None = None,
    ) -> Metrics:
        """Takes one optimizer step towards `returns` on this rank's part of a mini-batch, which may be empty; needs the
        columns `values` and `returns`. Metrics are named `critic/*`."""
        self.model.train()
        scale, parts = LossScale.of(batch, loss_agg_mode), []
        with self.optimizer.training():
            for rows, packed in self._passes(batch, learns=True):
                micro = batch.select_idxs(rows).to(self._device)
                mask = micro.batch["response_mask"]
                loss, metrics = value_loss(
                    vpreds=self._score(packed),
                    values=micro.batch["values"],
                    returns=micro.batch["returns"],
                    response_mask=mask,
                    cliprange_value=cliprange_value,
                    loss_agg_mode=loss_agg_mode,
                    loss_scale_factor=loss_scale_factor,
                    **scale.counts(micro),
                )
                self.optimizer.backward(loss)
                parts.append(weigh({**metrics, "critic/vf_loss": scale.as_mean(loss, mask)}, mask))
            return add_metrics(parts) | self.step()

    def step(self) -> Metrics:
        """Takes the optimizer step; returns the metrics of `step_metrics`, named `critic/*`."""
        return {f"critic/{name}": metric for name, metric in step_metrics(self.optimizer).items()}
