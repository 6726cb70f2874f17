"""The policy's training engine: log-probs of a batch, and gradient steps on a mini-batch.

Invariant: micro-batches are packed (no padding is computed) and cut by a token budget; how they are cut changes the
gradient only by rounding, because losses are normalised by the whole mini-batch's token and sequence counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from etude.models.packable import enable_packing
from etude.models.packed import logit_finish
from etude.models.vision import Vision
from etude.protocol import DataProto
from etude.training.images import check_images
from etude.training.log_probs import token_log_probs
from etude.training.microbatches import micro_batches
from etude.training.optim import OptimizerSet
from etude.training.packing import PackedRows, pack


@dataclass(frozen=True)
class LossScale:
    """Counts of the whole mini-batch, for `agg_loss`."""

    batch_num_tokens: float
    global_batch_size: float

    def as_mean(self, part: Tensor, response_mask: Tensor) -> float:
        """A micro-batch's part of a sum over the mini-batch, as a figure whose mean over scored tokens is that sum."""
        return float(part.detach()) * self.batch_num_tokens / max(float(response_mask.sum()), 1.0)


# (log_probs, entropy, micro-batch, scale) → loss to add up over micro-batches, and figures to average over tokens.
MicroLoss = Callable[[Tensor, Tensor, DataProto, LossScale], "tuple[Tensor, dict[str, float]]"]


def accumulate(
    batch: DataProto, max_tokens: int, step: Callable[[list[int]], dict[str, float]], vision: Vision | None = None
) -> dict[str, float]:
    """Runs `step` on the micro-batches of the scored rows; figures are averaged by scored tokens."""
    tokens = batch.batch["response_mask"].sum(dim=1)
    totals: dict[str, float] = defaultdict(float)
    for chosen in micro_batches(batch, max_tokens, vision):
        weight = float(tokens[chosen].sum())
        for name, value in step(chosen).items():
            totals[name] += value * weight
    scored = max(float(tokens.sum()), 1.0)
    return {name: value / scored for name, value in totals.items()}


class PolicyEngine:
    """Computes log-probs with, and takes gradient steps on, a Hugging Face causal LM."""

    def __init__(self, model: Any, *, max_tokens: int, optimizer: OptimizerSet | None = None) -> None:
        """`max_tokens`: token budget of a micro-batch. Without an optimizer the engine only computes (a reference)."""
        enable_packing(model)
        self.model, self.optimizer, self._max_tokens = model, optimizer, max_tokens
        self._device, self._vision = next(model.parameters()).device, Vision.of(model.config)

    def _forward(self, packed: PackedRows, temperature: float, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        return token_log_probs(
            packed.hidden(self.model),
            head.weight,
            packed.labels,
            bias=head.bias,
            finish=logit_finish(self.model),
            temperature=temperature,
            entropy_grad=entropy_grad,
        )

    @torch.no_grad()
    def log_probs(self, batch: DataProto, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (batch, response_len) on the CPU; 0 where `response_mask` is 0."""
        check_images(batch, self.model.config)
        self.model.eval()
        result = torch.zeros(batch.batch["response_mask"].shape, dtype=torch.float32)
        entropy = torch.zeros_like(result)

        def step(rows: list[int]) -> dict[str, float]:
            packed = pack(batch, rows, self._device, self._vision)
            values, entropies = self._forward(packed, temperature)
            result[rows] = packed.scatter(values).cpu()
            entropy[rows] = packed.scatter(entropies).cpu()
            return {}

        accumulate(batch, self._max_tokens, step, self._vision)
        return result, entropy

    def update(
        self, batch: DataProto, loss_of: MicroLoss, temperature: float, entropy_grad: bool = False
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch; returns the loss's figures, `grad_norm`, `lr`, and `skipped_steps`: 1 where
        the gradient was not finite and nothing was learned."""
        assert self.optimizer is not None
        check_images(batch, self.model.config)
        self.optimizer.zero_grad()  # a step that failed half-way may have left some
        self.model.train()
        mask = batch.batch["response_mask"]
        scale = LossScale(float(mask.sum()), float(mask.any(dim=1).sum()))
        total = 0.0

        def step(rows: list[int]) -> dict[str, float]:
            nonlocal total
            packed = pack(batch, rows, self._device, self._vision)
            values, entropies = self._forward(packed, temperature, entropy_grad)
            micro = batch.select_idxs(rows).to(self._device)
            loss, metrics = loss_of(packed.scatter(values), packed.scatter(entropies), micro, scale)
            loss.backward()
            total += float(loss.detach())
            return metrics

        lr = self.optimizer.lr
        metrics = accumulate(batch, self._max_tokens, step, self._vision)
        norm = self.optimizer.step()
        skipped = float(not math.isfinite(norm))
        return metrics | {"loss": total, "grad_norm": norm, "lr": lr, "skipped_steps": skipped}
