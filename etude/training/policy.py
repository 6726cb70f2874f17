"""The policy's training engine: log-probs of a batch, and gradient steps on a mini-batch.

Invariant: micro-batches are packed (no padding is computed) and split by a token budget; the split and the number of ranks
change the gradient only by rounding, because losses are normalised by the whole mini-batch's token and rollout counts, and
gradients are sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from etude.algorithms import loss_count
from etude.errors import ConfigError
from etude.metrics import Max, Mean, Metric, Metrics, Pooled, add_metrics
from etude.models.experts import Balance, replay_experts, routers
from etude.models.packable import enable_packing
from etude.models.packed import logit_finish
from etude.models.vision import Vision
from etude.protocol import DataProto
from etude.training.images import check_images
from etude.training.log_probs import token_log_probs
from etude.training.microbatches import filler, micro_batches
from etude.training.optim import OptimizerSet
from etude.training.packing import PackedRows, pack
from etude.training.sharding import compute_device, count_passes, run_forward

if TYPE_CHECKING:
    from etude.training.value import ValueEngine


@dataclass(frozen=True)
class LossScale:
    """Counts of the whole mini-batch, for `agg_loss`, and its mode."""

    batch_num_tokens: float
    global_batch_size: float
    loss_agg_mode: str = "token-mean"

    @classmethod
    def of(cls, batch: DataProto, loss_agg_mode: str) -> LossScale:
        """From the counts in `batch`'s meta_info (`count_scored` of the whole mini-batch); without them, from `batch`
        itself."""
        counts = count_scored(batch) | batch.meta_info
        return cls(counts["batch_num_tokens"], counts["global_batch_size"], loss_agg_mode)

    def counts(self, micro: DataProto) -> dict[str, Any]:
        """What `agg_loss` takes of the mini-batch, for its part `micro`."""
        return {
            "batch_num_tokens": self.batch_num_tokens,
            "global_batch_size": self.global_batch_size,
            "rollout_tokens": micro.batch.get("rollout_tokens", None),
        }

    def as_mean(self, part: Tensor, response_mask: Tensor) -> Mean:
        """A micro-batch's part of a loss: the parts add up to the mini-batch's loss, weighted by its divisor."""
        count = loss_count(self.loss_agg_mode, self.batch_num_tokens, self.global_batch_size)
        share = float(response_mask.sum()) / max(self.batch_num_tokens, 1.0)
        return Mean(float(part.detach()) * count, count * share)


def count_scored(batch: DataProto, main_rows: Tensor | None = None) -> dict[str, float]:
    """Scored tokens, and rollouts that have any: the divisors of a loss over the whole `batch`.

    With `main_rows` (rows,), true where a rollout begins, the column `rollout_tokens` is added: the scored tokens of each
    row's rollout. Without it each row is a rollout.
    """
    tokens = batch.batch["response_mask"].sum(dim=1)
    if main_rows is not None:
        rollout = main_rows.long().cumsum(dim=0) - 1
        of_rollouts = torch.zeros_like(tokens).index_add(0, rollout, tokens)
        batch.batch["rollout_tokens"], tokens = of_rollouts[rollout], of_rollouts
    return {"batch_num_tokens": float(tokens.sum()), "global_batch_size": float((tokens > 0).sum())}


# (log_probs, entropy, micro-batch, scale) → loss to add up over micro-batches, and metrics (bare numbers: means over the
# micro-batch's scored tokens). A micro-batch with `teacher_topk_ids` has the column `topk_log_probs`, too: the log-probs of
# these ids (rows, response_len, k), with a gradient; so has one with a critic on the trunk `vpreds` (rows, response_len).
MicroLoss = Callable[[Tensor, Tensor, DataProto, LossScale], "tuple[Tensor, Mapping[str, Metric]]"]


def weigh(metrics: Mapping[str, Metric], response_mask: Tensor) -> Metrics:
    """A micro-batch's metrics, bare numbers as means over its scored tokens."""
    weight = float(response_mask.sum())
    return {name: m if isinstance(m, Mean | Max | Pooled) else Mean(m * weight, weight) for name, m in metrics.items()}


def step_metrics(optimizer: OptimizerSet) -> Metrics:
    """Takes the optimizer step: `grad_norm`, `lr`, and the counts `optimizer_steps` and, for non-finite gradients,
    `skipped_steps`. They are equal on all ranks; the first one reports them."""
    lr, norm = optimizer.lr, optimizer.step()
    skipped = float(not math.isfinite(norm))
    if optimizer.rank:
        return {}
    return {"grad_norm": Mean(norm, 1), "lr": Mean(lr, 1), "optimizer_steps": 1.0, "skipped_steps": skipped}


class PolicyEngine:
    """Computes log-probs with, and takes gradient steps on, a Hugging Face causal LM."""

    def __init__(
        self,
        model: Any,
        *,
        max_tokens: int,
        optimizer: OptimizerSet | None = None,
        router_aux_loss_coef: float = 0.0,
    ) -> None:
        """`max_tokens`: token budget of a micro-batch. Without an optimizer the engine only computes (a reference).
        `router_aux_loss_coef`: weight of a mixture's load-balancing loss (`etude.models.experts.Balance`) in updates.

        Raises:
            ConfigError: the loss is asked for, and the model is no mixture of experts.
        """
        if router_aux_loss_coef and not routers(model):
            raise ConfigError(
                "actor.router_aux_loss_coef is above 0, and the model has no routers of a mixture of experts"
            )
        self._router_aux_loss_coef = router_aux_loss_coef
        enable_packing(model)
        self.model, self.optimizer, self._max_tokens = model, optimizer, max_tokens
        self._device, self._vision = compute_device(model), Vision.of(model.config)
        self.critic: ValueEngine | None = None  # on this model's trunk, trained with it

    def _forward(
        self,
        packed: PackedRows,
        temperature: float,
        entropy_grad: bool = False,
        squares: Tensor | None = None,
        likeliest: tuple[Tensor, Tensor] | None = None,
        labels: Tensor | None = None,
        values: bool = False,
    ) -> tuple[Tensor, ...]:
        """Log-probs and entropies of the scored tokens and, with `values`, their values (scored,) by the critic."""
        head = self.model.get_output_embeddings()

        def compute() -> tuple[Tensor, ...]:
            hidden = packed.hidden(self.model)
            found = token_log_probs(
                hidden,
                head.weight,
                packed.labels if labels is None else labels,
                bias=head.bias,
                finish=logit_finish(self.model),
                temperature=temperature,
                entropy_grad=entropy_grad,
                sum_pi_squared=squares,
                likeliest=likeliest,
                support=packed.support,
            )
            return (*found, self.critic.model.values_of(hidden, to_trunk=True)) if values and self.critic else found

        return run_forward(self.model, compute)

    def _idle(self) -> Tensor:
        """0 with a gradient of 0: a pass of a sharded model for which this rank has no rows, and another one has."""
        return self._forward(pack(filler(), [0], self._device), 1.0)[0].sum() * 0

    @torch.no_grad()
    def log_probs(
        self, batch: DataProto, temperature: float, *, sum_pi_squared: bool = False, topk: int = 0
    ) -> tuple[Tensor, ...]:
        """Log-probs, entropies and, with `sum_pi_squared`, Σ p² over the vocabulary: (batch, response_len) on the CPU, 0
        where `response_mask` is 0; with `topk`, the ids and log-probs of the likeliest tokens (batch, response_len, topk),
        too."""
        check_images(batch, self.model.config)
        self.model.eval()
        kind = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        shape = batch.batch["response_mask"].shape
        result = [torch.zeros(shape, dtype=kind) for _ in range(2 + sum_pi_squared)]
        if topk:
            result += [torch.zeros((*shape, topk), dtype=torch.long), torch.zeros((*shape, topk), dtype=kind)]
        micros = micro_batches(batch, self._max_tokens, self._vision)
        idle = count_passes(self.model, len(micros)) - len(micros)
        for rows in micros:
            packed = pack(batch, rows, self._device, self._vision)
            squares = packed.labels.new_empty(len(packed.labels), dtype=kind) if sum_pi_squared else None
            ids = packed.labels.new_empty(len(packed.labels), topk)
            top = ids, torch.empty_like(ids, dtype=kind)
            with replay_experts(self.model, packed.experts):
                found = self._forward(packed, temperature, squares=squares, likeliest=top if topk else None)
            found = (*found, *(() if squares is None else (squares,)), *(top if topk else ()))
            for column, values in zip(result, found, strict=True):
                column[rows] = packed.scatter(values).cpu()
        for _ in range(idle):
            self._idle()
        return tuple(result)

    def update(
        self,
        batch: DataProto,
        loss_of: MicroLoss,
        temperature: float,
        entropy_grad: bool = False,
        loss_agg_mode: str = "token-mean",
    ) -> Metrics:
        """One optimizer step on this rank's part of a mini-batch, which may be empty (see `LossScale.of` for the counts that
        come with it); returns the loss's metrics, `loss`, and those of `step_metrics`."""
        optimizer, critic = self.optimizer, self.critic
        assert optimizer is not None
        check_images(batch, self.model.config)
        self.model.train()
        scale, parts = LossScale.of(batch, loss_agg_mode), []
        micros = micro_batches(batch, self._max_tokens, self._vision)
        idle = count_passes(self.model, len(micros)) - len(micros)
        with optimizer.training(), critic.optimizer.training() if critic else nullcontext():
            whole = self._balance(batch, micros, idle, optimizer.world_size) if self._router_aux_loss_coef else None
            for rows in micros:
                packed = pack(batch, rows, self._device, self._vision)
                micro = batch.select_idxs(rows).to(self._device)
                taught, labels = micro.batch.get("teacher_topk_ids"), packed.labels
                if taught is not None:
                    labels = torch.cat([labels[:, None], taught[packed.row, packed.column].long()], dim=1)
                balance = Balance()
                recorded = balance.recording(self.model, packed.shared) if whole else nullcontext()
                # Both hold in the backward pass, too, where checkpointed layers are computed again.
                with replay_experts(self.model, packed.experts), recorded:
                    log_probs, entropies, *values = self._forward(
                        packed, temperature, entropy_grad, labels=labels, values=critic is not None
                    )
                    if taught is not None:
                        micro.batch["topk_log_probs"] = packed.scatter(log_probs[:, 1:])
                        log_probs = log_probs[:, 0]
                    if values:
                        micro.batch["vpreds"] = packed.scatter(values[0])
                    loss, metrics = loss_of(packed.scatter(log_probs), packed.scatter(entropies), micro, scale)
                    if whole is not None:
                        uneven = balance.loss(whole)
                        loss = loss + self._router_aux_loss_coef * uneven
                        metrics = {**metrics, "router_aux_loss": scale.as_mean(uneven, micro.batch["response_mask"])}
                    optimizer.backward(loss)
                mask = micro.batch["response_mask"]
                parts.append(weigh({**metrics, "loss": scale.as_mean(loss, mask)}, mask))
            for _ in range(idle):
                optimizer.backward(self._idle())
            found = add_metrics(parts) | step_metrics(optimizer)
            return found if critic is None else found | critic.step()

    @torch.no_grad()
    def _balance(self, batch: DataProto, micros: Sequence[list[int]], idle: int, ranks: int) -> Balance:
        """Of the whole mini-batch, by a forward pass of its own: where the routers send tokens must be known before the
        first backward pass."""
        whole = Balance()
        for rows in micros:
            packed = pack(batch, rows, self._device, self._vision)
            with replay_experts(self.model, packed.experts), whole.recording(self.model, packed.shared):
                self._forward(packed, 1.0)
        for _ in range(idle):
            self._idle()
        if ranks > 1:
            experts: Any = routers(self.model)[0].weight
            sums = torch.zeros(len(experts) + 1, dtype=torch.float64, device=self._device)
            if micros:
                sums += torch.cat([torch.as_tensor(whole.sent), torch.as_tensor(whole.pairs)[None]])
            dist.all_reduce(sums)
            whole.sent, whole.pairs = sums[:-1], sums[-1]
        return whole
