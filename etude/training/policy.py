"""The policy's training engine: log-probs of a batch, and gradient steps on a mini-batch.

Invariant: micro-batches are packed (no padding is computed) and split by a token budget. The split and the number of ranks
change the gradient only by rounding, because losses are normalised by the whole mini-batch's token and rollout counts, and
gradients are summed.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from etude.errors import ConfigError
from etude.metrics import Metrics, add_metrics
from etude.models.experts import Balance, replay_experts, routers
from etude.models.packed import logit_finish
from etude.protocol import DataProto
from etude.training.log_probs import token_log_probs
from etude.training.loss_scale import LossScale, MicroLoss, weigh
from etude.training.microbatches import Learner
from etude.training.optim import OptimizerSet, step_metrics
from etude.training.packing import PackedRows
from etude.training.sharding import run_forward
from etude.training.ulysses import SequenceTeam
from etude.training.value import ValueLearner


class PolicyLearner(Learner):
    """Computes log-probs with a Hugging Face causal LM, and takes gradient steps on it."""

    def __init__(
        self,
        model: Any,
        *,
        max_tokens: int,
        optimizer: OptimizerSet | None = None,
        router_aux_loss_coef: float = 0.0,
        team: SequenceTeam | None = None,
    ) -> None:
        """See `Learner`.

        Args:
            optimizer: None for an engine that only computes log-probs (a reference).
            router_aux_loss_coef: weight of the load-balancing loss of a mixture of experts (`etude.models.experts.Balance`).

        Raises:
            ConfigError: `router_aux_loss_coef` is set, but the model is not a mixture of experts.
        """
        if router_aux_loss_coef and not routers(model):
            raise ConfigError(
                "actor.router_aux_loss_coef is above 0, and the model has no routers of a mixture of experts"
            )
        super().__init__(model, model, max_tokens, optimizer, team)
        self._router_aux_loss_coef = router_aux_loss_coef
        self.critic: ValueLearner | None = None  # a value head on this model's trunk, trained together with it

    def _forward(
        self,
        packed: PackedRows,
        temperature: float,
        entropy_grad: bool = False,
        squares: Tensor | None = None,
        top_k: tuple[Tensor, Tensor] | None = None,
        labels: Tensor | None = None,
        values: bool = False,
    ) -> tuple[Tensor, ...]:
        """Returns log-probs and entropies of the scored tokens and, with `values`, the critic's values (scored,)."""
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
                top_k=top_k,
                support=packed.support,
            )
            return (*found, self.critic.model.values_of(hidden, to_trunk=True)) if values and self.critic else found

        return run_forward(self.model, compute)

    def _score(self, packed: PackedRows) -> Tensor:
        return self._forward(packed, 1.0)[0]

    @torch.no_grad()
    def log_probs(
        self,
        batch: DataProto,
        temperature: float,
        *,
        sum_pi_squared: bool = False,
        topk: int = 0,
        alone: bool = False,
    ) -> tuple[Tensor, ...]:
        """Returns log-probs, entropies and, with `sum_pi_squared`, Σ p² over the vocabulary: (batch, response_len) on the
        CPU, 0 where `response_mask` is 0; with `topk`, also the ids and log-probs of the top-k tokens (batch, response_len,
        topk). `alone`: `batch` is this rank's, and its team, if any, has another."""
        self.model.eval()
        kind = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        shape = batch.batch["response_mask"].shape
        result = [torch.zeros(shape, dtype=kind) for _ in range(2 + sum_pi_squared)]
        if topk:
            result += [torch.zeros((*shape, topk), dtype=torch.long), torch.zeros((*shape, topk), dtype=kind)]
        for rows, packed in self._passes(batch, alone=alone):
            squares = packed.labels.new_empty(len(packed.labels), dtype=kind) if sum_pi_squared else None
            ids = packed.labels.new_empty(len(packed.labels), topk)
            top = ids, torch.empty_like(ids, dtype=kind)
            with replay_experts(self.model, packed.experts):
                found = self._forward(packed, temperature, squares=squares, top_k=top if topk else None)
            found = (*found, *(() if squares is None else (squares,)), *(top if topk else ()))
            for column, values in zip(result, found, strict=True):
                column[rows] = packed.scatter(values).cpu()
        return tuple(result)

    def update(
        self,
        batch: DataProto,
        loss_of: MicroLoss,
        temperature: float,
        entropy_grad: bool = False,
        loss_agg_mode: str = "token-mean",
    ) -> Metrics:
        """Takes one optimizer step on this rank's part of a mini-batch, which may be empty; its meta_info has the counts of
        the whole (see `LossScale.of`). Returns the loss's metrics, `loss`, and those of `step_metrics`."""
        optimizer, critic = self.optimizer, self.critic
        assert optimizer is not None
        with optimizer.training(), critic.optimizer.training() if critic else nullcontext():
            found = self.accumulate(batch, loss_of, temperature, entropy_grad, loss_agg_mode) | step_metrics(optimizer)
            return found if critic is None else found | critic.step()

    def accumulate(
        self,
        batch: DataProto,
        loss_of: MicroLoss,
        temperature: float,
        entropy_grad: bool = False,
        loss_agg_mode: str = "token-mean",
    ) -> Metrics:
        """Adds the gradients of a mini-batch's loss to those that the next step takes, and returns the metrics of `update`
        without those of a step. Under `torch.no_grad` it only computes the loss."""
        optimizer, critic = self.optimizer, self.critic
        assert optimizer is not None
        self.model.train()
        scale, parts = LossScale.of(batch, loss_agg_mode), []
        whole = self._balance(batch, optimizer.world_size) if self._router_aux_loss_coef else None
        for rows, packed in self._passes(batch, learns=True):
            micro = batch.select_idxs(rows).to(self._device)
            labels = packed.labels
            others: dict[str, Tensor] = {}  # ids beside the labels, by the column for their log-probs
            if (taught := micro.batch.get("teacher_topk_ids")) is not None:
                others["topk_log_probs"] = taught[packed.row, packed.column].long()
            if packed.heads is not None:
                others["sampler_topk_log_probs"], sampled_from = packed.heads
                micro.batch["sampler_head"] = packed.scatter(sampled_from)
            if others:
                labels = torch.cat([labels[:, None], *others.values()], dim=1)
            balance = Balance()
            recorded = balance.recording(self.model, packed.shared) if whole else nullcontext()
            # Both must cover the backward pass, too, because it recomputes checkpointed layers.
            with replay_experts(self.model, packed.experts), recorded:
                log_probs, entropies, *values = self._forward(
                    packed, temperature, entropy_grad, labels=labels, values=critic is not None
                )
                if others:
                    ours, *others_found = log_probs.split([1, *(ids.shape[1] for ids in others.values())], dim=1)
                    micro.batch.update(dict(zip(others, map(packed.scatter, others_found))))
                    log_probs = ours[:, 0]
                if values:
                    micro.batch["vpreds"] = packed.scatter(values[0])
                loss, metrics = loss_of(packed.scatter(log_probs), packed.scatter(entropies), micro, scale)
                if whole is not None:
                    uneven = packed.total(balance.loss(whole))
                    loss = loss + self._router_aux_loss_coef * uneven
                    metrics = {**metrics, "router_aux_loss": scale.as_mean(uneven, micro.batch["response_mask"])}
                if torch.is_grad_enabled():
                    optimizer.backward(loss)
            mask = micro.batch["response_mask"]
            parts.append(weigh({**metrics, "loss": scale.as_mean(loss, mask)}, mask))
        return add_metrics(parts)

    @torch.no_grad()
    def _balance(self, batch: DataProto, ranks: int) -> Balance:
        """Measures the balance of the whole mini-batch in an extra forward pass: the loss needs the routing of all tokens
        before the first backward pass."""
        whole = Balance()
        for _, packed in self._passes(batch):
            with replay_experts(self.model, packed.experts), whole.recording(self.model, packed.shared):
                self._forward(packed, 1.0)
        if ranks > 1:
            experts: Any = routers(self.model)[0].weight
            sums = torch.zeros(len(experts) + 1, dtype=torch.float64, device=self._device)
            if isinstance(whole.sent, Tensor):  # this rank has rows
                sums += torch.cat([whole.sent, torch.as_tensor(whole.pairs)[None]])
            dist.all_reduce(sums)
            whole.sent, whole.pairs = sums[:-1], sums[-1]
        return whole
