"""The critic's training engine: values of a batch, and gradient steps on a mini-batch. Packs rows like the policy's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from etude.algorithms import value_loss
from etude.metrics import Metrics, add_metrics
from etude.models.packable import use_packing
from etude.models.vision import Vision
from etude.protocol import DataProto
from etude.training.images import check_images
from etude.training.loss_scale import LossScale, weigh
from etude.training.microbatches import filler, micro_batches
from etude.training.optim import OptimizerSet, step_metrics
from etude.training.packing import PackedRows, pack
from etude.training.sharding import compute_device, count_passes, delay_sums, run_forward
from etude.training.ulysses import SequenceTeam


class ValueLearner:
    """Trains a `ValueModel`, or a policy's `SharedValueHead`. A token's value is that of its context."""

    def __init__(
        self, model: Any, *, max_tokens: int, optimizer: OptimizerSet, team: SequenceTeam | None = None
    ) -> None:
        """`max_tokens`, `team`: as for `PolicyLearner`.

        Raises:
            ConfigError: the team cannot share the model.
        """
        self.model, self.optimizer, self._team = model, optimizer, team
        self._max_tokens = max_tokens if use_packing(model.backbone) else 1  # 1: each row is a micro-batch of its own
        if team is not None:
            team.check(model.backbone)
            self._max_tokens *= team.size
        self._device, self._vision = compute_device(model), Vision.of(model.config)

    def _forward(self, packed: PackedRows) -> Tensor:
        model = self.model
        return run_forward(model, lambda: packed.scatter(model.values_of(packed.hidden(model.backbone))))

    def _idle(self) -> Tensor:
        """See `PolicyLearner._idle`."""
        return self._forward(pack(filler(), [0], self._device, team=self._team)).sum() * 0

    @torch.no_grad()
    def values(self, batch: DataProto) -> Tensor:
        """Returns values (batch, response_len) on the CPU; 0 where `response_mask` is 0."""
        check_images(batch, self.model.config)
        self.model.eval()
        result = torch.zeros(batch.batch["response_mask"].shape, dtype=self.model.head.weight.dtype)
        micros = micro_batches(batch, self._max_tokens, self._vision)
        idle = count_passes(self.model, len(micros)) - len(micros)
        for rows in micros:
            result[rows] = self._forward(pack(batch, rows, self._device, self._vision, self._team)).cpu()
        for _ in range(idle):
            self._idle()
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
        check_images(batch, self.model.config)
        self.model.train()
        scale, parts = LossScale.of(batch, loss_agg_mode), []
        micros = micro_batches(batch, self._max_tokens, self._vision)
        idle = count_passes(self.model, len(micros)) - len(micros)
        with self.optimizer.training():
            for number, rows in enumerate(micros, 1):
                delay_sums(self.model, number == len(micros) + idle)
                micro = batch.select_idxs(rows).to(self._device)
                mask = micro.batch["response_mask"]
                loss, metrics = value_loss(
                    vpreds=self._forward(pack(batch, rows, self._device, self._vision, self._team)),
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
            for left in reversed(range(idle)):
                delay_sums(self.model, not left)
                self.optimizer.backward(self._idle())
            return add_metrics(parts) | self.step()

    def step(self) -> Metrics:
        """Takes the optimizer step; returns the metrics of `step_metrics`, named `critic/*`."""
        return {f"critic/{name}": metric for name, metric in step_metrics(self.optimizer).items()}
