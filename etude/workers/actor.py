"""`TrainWorker`: trains the actor; also holds the frozen reference policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etude.agents.batch import IMAGES, OF_SEQUENCES
from etude.algorithms import (
    POLICY_LOSSES,
    PolicyLoss,
    agg_loss,
    center_scores,
    forward_kl_topk,
    importance_weights,
    kl_penalty,
    masked_mean,
    off_policy_sequence_mask,
    policy_loss,
    rejection_mask,
    rollout_mismatch,
    value_loss,
)
from etude.distributed import Dispatch, register
from etude.errors import ConfigError
from etude.metrics import Metrics
from etude.models.heap import trim_heap
from etude.models.lora import without_adapters
from etude.models.value import SharedValueHead
from etude.protocol import DataProto
from etude.training import LossScale, MicroLoss, OptimizerSet, PolicyLearner, ValueLearner, sft_step
from etude.trajectory import KEPT_IDS
from etude.workers.checkpoint import STATE, TrainedWorker, read_state
from etude.workers.critic import CRITIC_COLUMNS, CriticWorker, value_options
from etude.workers.engine_link import score_rows
from etude.workers.lagging import LaggingWeights
from etude.workers.role import TOKENS
from etude.workers.teacher import TOPK_COLUMNS, teacher_columns
from etude.workers.weight_chunks import WeightSender

TEACHER = "teacher"  # a lagging teacher's weights, in the actor's part of a checkpoint


class TrainWorker(TrainedWorker):
    """Computes log-probs and trains the policy, on advantages or demonstrations."""

    role = "actor"
    _token_values: dict[int, tuple[int, Tensor, Tensor]] | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        """Loads the model and, if needed, the reference, and builds the optimizer; its learning-rate schedule
        counts training steps and ends after `total_steps`.

        Raises:
            ConfigError: the model's folder or an optimizer setting is wrong.
        """
        options, actor = self.options, self.options.actor
        device = self.loading_device(actor)
        self._team = self.join_team(actor)
        self.model = self.load_policy(self.loading_dtype(options.model, device), device)
        self.prepare_training(self.model, options.model)
        self._optimizer = self.build_optimizer(
            actor, total_steps, options.trainer.critic_warmup if "values" in options.needs else 0
        )
        self._actor = PolicyLearner(
            self.model,
            max_tokens=actor.ppo_max_token_len_per_gpu,
            optimizer=self._optimizer,
            router_aux_loss_coef=actor.router_aux_loss_coef,
            team=self._team,
        )
        if options.value_head:
            self._add_critic(total_steps)
        self._ref: PolicyLearner | None = None
        if options.needs_ref:
            network = self.model
            if not options.model.lora_rank:
                network = self.load_policy(self.dtype, device).requires_grad_(False)
                self.shard(network, actor)
            self._ref = PolicyLearner(network, max_tokens=options.ref.log_prob_max_token_len_per_gpu, team=self._team)
        self._teacher = LaggingWeights(self.model) if options.distillation.lags else None
        self._sender = WeightSender(self.model, options, self.dtype, self.rank)
        self.prepare_saves()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, columns=TOKENS, optional=OF_SEQUENCES)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Returns `old_log_probs`, `entropys` and, if meta_info asks for it, `sum_pi_squared` (batch, response_len) of the
        current weights at meta_info's `temperature`; with `in_update`, of the weights where the next gradient is taken."""
        meta, squares = data.meta_info, bool(data.meta_info.get("sum_pi_squared"))
        with self._optimizer.training() if meta.get("in_update") else nullcontext():
            outputs = self._actor.log_probs(data, meta["temperature"], sum_pi_squared=squares)
        return DataProto.from_single_dict(dict(zip(("old_log_probs", "entropys", "sum_pi_squared"), outputs)))

    def _add_critic(self, total_steps: int | None) -> None:
        """Adds a value head on the policy's trunk, with its own optimizer."""
        critic, head = self.options.critic, SharedValueHead(self.model)
        optimizer = OptimizerSet(head, critic.optim, total_steps, rank=self.rank, world_size=self.world_size)
        self._actor.critic = ValueLearner(
            head, max_tokens=critic.ppo_max_token_len_per_gpu, optimizer=optimizer, team=self._team
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, columns=TOKENS, optional=(IMAGES,))
    def compute_values(self, data: DataProto) -> DataProto:
        """See `CriticWorker.compute_values`; uses the value head on the policy's trunk."""
        assert self._actor.critic is not None
        return DataProto.from_single_dict({"values": self._actor.critic.values(data)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE, columns=CRITIC_COLUMNS, optional=("rollout_tokens", IMAGES))
    def update_critic(self, data: DataProto) -> Metrics:
        """See `CriticWorker.update_critic`; updates only the value head, before the actor's updates, which change both."""
        assert self._actor.critic is not None
        self._actor.critic.optimizer.training_step = data.meta_info["global_step"]
        return self._actor.critic.update(data, **value_options(self.options))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, columns=TOKENS, optional=OF_SEQUENCES)
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """See `TeacherWorker.compute_teacher_log_prob`; uses the current weights, or those that lag behind them."""
        with nullcontext() if self._teacher is None else self._teacher.applied():
            return teacher_columns(self._actor, data, self.options.distillation.topk, len(self.tokenizer))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_teacher(self) -> None:
        """Moves the weights of the teacher `self` towards the current ones."""
        if self._teacher is not None:
            self._teacher.update(self.options.distillation.teacher_update_rate)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, columns=TOKENS, optional=(IMAGES, KEPT_IDS))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Returns `ref_log_prob` (batch, response_len) of the reference policy: the initial model, whose routers, if any,
        select experts themselves (no replay)."""
        if self._ref is None:
            raise ConfigError("no reference policy was loaded: nothing in the configuration uses one")
        with without_adapters(self._ref.model):
            log_probs = self._ref.log_probs(data, data.meta_info["temperature"])[0]
        return DataProto.from_single_dict({"ref_log_prob": log_probs})

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE,
        columns=(*TOKENS, "advantages"),
        optional=(
            *PolicyLoss.columns,
            *TOPK_COLUMNS,
            "old_values",
            "value_targets",
            "rollout_tokens",
            "selected_tokens",
            "rollout_is_weights",
            "row",
            *OF_SEQUENCES,
        ),
    )
    def update_actor(self, data: DataProto) -> Metrics:
        """Takes one optimizer step on this rank's part of a mini-batch. meta_info: `temperature`, `global_step`, the counts
        of `etude.training.count_scored`, and `compare_rollout`: whether to compare the step's log-probs, while no update has
        changed the weights yet, with the engine's. Returns metrics named `actor/*`."""
        actor, meta = self.options.actor, data.meta_info
        self._optimizer.training_step = meta["global_step"]
        if self._actor.critic is not None:
            self._actor.critic.optimizer.training_step = meta["global_step"]
        compares = meta.get("compare_rollout") and not actor.optim.steps_apart  # else other weights sampled
        loss: MicroLoss = self._loss_with_mismatch if compares else self._loss
        if "row" in data.batch:
            loss = self._record_values(loss, meta.get("update", 0))
        metrics = self._actor.update(data, loss, meta["temperature"], actor.entropy_coeff != 0, actor.aggregation)
        self.weights_changed()
        trim_heap()
        return {name if "/" in name else f"actor/{name}": metric for name, metric in metrics.items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, in_background=True)
    def update_progress(self) -> tuple[int, int]:
        """(done, total) micro-batches of the current (or last) mini-batch; may be called while it is learned from."""
        return self._actor.progress

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def next_weights(self, first: bool) -> DataProto:
        """Returns a chunk of the weights for a separate rollout group; see `WeightSender.next`."""
        return self._sender.next(first)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def score_draws(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Log-probs of the responses of (prompt, response) pairs at the rollout temperature, flattened into one list."""
        scores = score_rows(self._actor, rows, self.options.rollout.temperature or 1.0)
        return [value for row in scores for value in row]

    def _record_values(self, loss: MicroLoss, update: int) -> MicroLoss:
        """Wraps `loss`, of the step's optimizer step `update`, to also record what `take_token_values` returns."""

        def record(log_probs: Tensor, entropy: Tensor, micro: DataProto, scale: LossScale) -> Any:
            kept = self._token_values = self._token_values or {}
            seen = log_probs.detach().to("cpu", torch.float32), entropy.detach().to("cpu", torch.float32)
            for row, *values in zip(micro.batch["row"].tolist(), *seen):
                kept[row] = update, values[0], values[1]
            return loss(log_probs, entropy, micro, scale)

        return record

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_token_values(self) -> DataProto | None:
        """Returns `row` and `update` (rows,), `log_probs` and `entropys` (rows, response_len) of this rank's last update of
        each row since the last call; None if there was none. Another rank's may be later: the ranks share out each
        mini-batch anew. Only batches with a column `row` are recorded."""
        recorded, self._token_values = self._token_values, None
        if not recorded:
            return None
        updates, log_probs, entropys = zip(*recorded.values())
        columns = {"row": torch.tensor([*recorded]), "update": torch.tensor(updates)}
        return DataProto.from_dict(columns | {"log_probs": torch.stack(log_probs), "entropys": torch.stack(entropys)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE, columns=TOKENS, optional=("token_weights", IMAGES))
    def update_sft(self, data: DataProto) -> Metrics:
        """Takes one supervised step on this rank's part of tokenised demonstrations
        (`etude.training.demonstrations_to_batch`); meta_info: `global_step`, and the counts of `count_scored`."""
        self._optimizer.training_step = data.meta_info["global_step"]
        metrics = sft_step(self._actor, data)
        self.weights_changed()
        return {f"sft/{name}": metric for name, metric in metrics.items()}

    def _loss_with_mismatch(
        self, log_probs: Tensor, entropy: Tensor, micro: DataProto, scale: LossScale
    ) -> tuple[Tensor, Metrics]:
        loss, metrics = self._loss(log_probs, entropy, micro, scale)
        columns = micro.batch
        return loss, metrics | rollout_mismatch(log_probs, columns["rollout_log_probs"], columns["response_mask"])

    def _loss(self, log_probs: Tensor, entropy: Tensor, micro: DataProto, scale: LossScale) -> tuple[Tensor, Metrics]:
        """The actor's objective on one micro-batch: policy loss, entropy bonus, KL to the reference."""
        actor, columns = self.options.actor, micro.batch
        assert columns is not None
        record, mask = POLICY_LOSSES.get(actor.policy_loss.loss_mode), columns["response_mask"]
        scaling: dict[str, Any] = scale.counts(micro) | {
            "loss_agg_mode": scale.loss_agg_mode,
            "loss_scale_factor": actor.loss_scale_factor or self.options.rollout.response_length,
        }
        # Without old log-probs there is a single update per batch, whose own log-probs serve as the old ones.
        old = columns.get("old_log_probs", log_probs.detach())
        weights, learned, metrics = self._loss_weights(log_probs, micro)
        inputs: dict[str, Any] = {need: columns[need] for need in record.needs}
        if record.selects:
            inputs["selected_tokens"] = columns["selected_tokens"]
        if weights is not None:
            inputs["rollout_is_weights"] = weights
        loss, loss_metrics = policy_loss(
            actor.policy_loss.loss_mode,
            old_log_prob=old,
            log_prob=log_probs,
            advantages=columns["advantages"],
            response_mask=mask,
            **inputs,
            **actor.loss_options(),
            **scaling,
        )
        metrics |= {**loss_metrics, "pg_loss": scale.as_mean(loss, mask)}
        metrics["entropy"] = mean = float(masked_mean(entropy.detach(), mask))
        metrics["entropy_share"] = mean / math.log(self.model.config.get_text_config().vocab_size)
        if "sampler_head" in columns:
            correction = self.options.algorithm.rollout_correction
            bounds = correction.is_bounds if correction.rollout_is else None
            centred, centring = center_scores(columns["sampler_topk_log_probs"], columns["sampler_head"], mask, bounds)
            loss = loss + agg_loss(columns["advantages"].to(loss.dtype) * learned * centred, mask, **scaling)
            metrics |= centring
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * agg_loss(entropy, mask, **scaling)
        if actor.use_kl_loss:
            penalty = kl_penalty(log_probs, columns["ref_log_prob"], actor.kl_loss_type)
            loss = loss + actor.kl_loss_coef * agg_loss(penalty, mask, **scaling)
            metrics["kl_loss"] = float(masked_mean(penalty.detach(), mask))
        if (topk_log_probs := columns.get("topk_log_probs")) is not None:
            distances, topk_metrics = forward_kl_topk(topk_log_probs, columns["teacher_topk_log_probs"], mask)
            loss = loss + self.options.distillation.coef * agg_loss(distances, mask, **scaling)
            metrics |= topk_metrics
        if "vpreds" in columns:
            vf_loss, vf_metrics = self._value_loss(micro, scale)
            loss, metrics = loss + vf_loss, metrics | vf_metrics
        return loss, metrics

    def _value_loss(self, micro: DataProto, scale: LossScale) -> tuple[Tensor, Metrics]:
        """The critic's part of the objective, if it shares the trunk."""
        columns, options = micro.batch, value_options(self.options)
        loss, loss_metrics = value_loss(
            vpreds=columns["vpreds"],
            values=columns["old_values"],
            returns=columns["value_targets"],
            response_mask=columns["response_mask"],
            **options,
            **scale.counts(micro),
        )
        own = replace(scale, loss_agg_mode=options["loss_agg_mode"])
        metrics: Metrics = {**loss_metrics, "critic/vf_loss": own.as_mean(loss, columns["response_mask"])}
        return self.options.critic.vf_coef * loss, metrics

    def states(self) -> dict[str, dict[str, Tensor]]:
        """See `TrainedWorker.states`; also a lagging teacher's weights, and the state of a critic on the trunk."""
        found = super().states()
        if self._teacher is not None:
            found[f"{self.role}/{TEACHER}"] = self._teacher.state_dict()
        if self._actor.critic is not None:
            found[f"{CriticWorker.role}/{STATE}"] = self._actor.critic.optimizer.state_dict()
        return found

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        super().load_checkpoint(folder)
        if self._teacher is not None:
            kept, self._teacher = Path(folder) / self.role / TEACHER, LaggingWeights(self.model)
            if kept.is_dir():  # else the run had no such teacher before
                self._teacher.load_state_dict(read_state(kept, empty=self._teacher.empty))
        if self._actor.critic is not None:
            self._actor.critic.optimizer.load_state_dict(read_state(Path(folder) / CriticWorker.role / STATE))

    def _loss_weights(self, log_probs: Tensor, micro: DataProto) -> tuple[Tensor | None, Tensor | float, Metrics]:
        """The weights of each token's loss, if any: the driver's importance weights; with `bypass_mode`, importance weights
        and rejection mask at the current policy; and the off-policy sequence mask. Also returns the product of the masks. A
        sequence here is a row."""
        correction, columns = self.options.algorithm.rollout_correction, micro.batch
        mask, engine = columns["response_mask"], columns["rollout_log_probs"]
        weights, metrics = columns.get("rollout_is_weights"), Metrics()
        if correction.bypass_mode and correction.rollout_is is not None:
            bounds = correction.is_bounds
            weights, metrics = importance_weights(log_probs - engine, mask, level=correction.rollout_is, bounds=bounds)
        masks = []
        if correction.bypass_mode and correction.rollout_rs:
            kept, rejected = rejection_mask(log_probs - engine, mask, correction.criteria)
            masks.append(kept.double())
            metrics |= rejected
        if (threshold := correction.off_policy_mask_threshold) is not None:
            kept, dropped = off_policy_sequence_mask(log_probs, engine, columns["advantages"], mask, threshold)
            masks.append(kept)
            metrics |= dropped
        factors = masks if weights is None else [weights, *masks]
        learned = math.prod(masks[1:], start=masks[0]).to(log_probs.dtype) if masks else 1.0
        return (math.prod(factors[1:], start=factors[0]).to(log_probs.dtype) if factors else None), learned, metrics
