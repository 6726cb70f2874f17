"""The policy's roles in one worker: actor, rollout and reference share a process, and actor and rollout the weights.

Invariant: a rollout samples from the actor's present weights: an engine in this process from the very tensors that the
actor updates, others from a copy that `EngineLink` hands over and checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from torch import Tensor

from etude.agents import AgentContext, AgentLoopManager, AgentParts, RolloutOptions, Sampling, to_batch
from etude.agents.batch import rows_of
from etude.algorithms import POLICY_LOSSES, agg_loss, kl_penalty, masked_mean, policy_loss, rollout_mismatch
from etude.chat import ToolParser
from etude.data import active_tools
from etude.distributed import Dispatch, Worker, register
from etude.errors import ConfigError
from etude.inference import evaluates_only
from etude.metrics import Metrics
from etude.models import check_vocabulary, load_causal_lm, save_pretrained, torch_dtype
from etude.protocol import DataProto
from etude.trace import Tracer
from etude.training import LossScale, OptimizerSet, PolicyEngine, round_weights, sft_step
from etude.workers.checkpoint import read_tensors, write_tensors
from etude.workers.engine_link import EngineLink, build_engine
from etude.workers.minibatches import update_epochs
from etude.workers.options import RoleOptions
from etude.workers.reading import load_reading
from etude.workers.reward import build_scorer

_MOST_INTERRUPTS = 8  # one that arrives inside a task ends the event loop once for every task that it passes through


class ActorRolloutRefWorker(Worker):
    """Samples, computes log-probs and learns. `parts` are what its agents talk to."""

    def __init__(
        self,
        options: RoleOptions,
        parts: AgentParts,
        **place: Any,
    ) -> None:
        super().__init__(device=options.device, **place)
        self.options, self._parts = options, parts
        self._updates = 0

    # -- set-up --------------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads tokenizer and model(s) and builds the optimizer and the engine.

        Raises:
            ConfigError: the model folder, a name in the rollout section or a reward setting is wrong.
        """
        options = self.options
        self._loop = asyncio.new_event_loop()  # one for the worker's life: tools may keep connections in it
        if evaluates_only(options.rollout.name):
            self._init_evaluation()
            return
        self._reading = load_reading(options.model, options.chat_template_kwargs)
        self.tokenizer, dtype = self._reading.tokenizer, options.model.dtype
        self.model = self._load_model("float32" if options.trains else dtype)
        optimizer = self._build_optimizer() if options.trains else None
        self._actor = PolicyEngine(self.model, max_tokens=options.actor.ppo_max_token_len_per_gpu, optimizer=optimizer)
        self._ref: PolicyEngine | None = None
        if options.needs_ref:
            self._ref = PolicyEngine(self._load_model(dtype), max_tokens=options.ref.log_prob_max_token_len_per_gpu)
        self._manager = self._build_manager(options.rollout, self.model)
        self._link = self._build_link(self._actor)

    def _build_optimizer(self) -> OptimizerSet:
        """Of the model in float32, which from here on computes in `model.dtype`."""
        options = self.options
        return OptimizerSet(
            self.model,
            options.actor.optim,
            options.total_steps,
            first_step=options.actor_first_step,
            exact=round_weights(self.model, torch_dtype(options.model.dtype)),
        )

    def _init_evaluation(self) -> None:
        """An engine that samples from a model of its own needs our tokenizer, and no weights of ours."""
        self._reading = load_reading(self.options.model, self.options.chat_template_kwargs)
        self.tokenizer = self._reading.tokenizer
        self._manager = self._build_manager(self.options.rollout, None)
        self._link = self._build_link(None)

    def _build_link(self, actor: PolicyEngine | None) -> EngineLink:
        context, options = self._manager.context, self.options
        return EngineLink(self._manager.engine, options.rollout, context.chat, actor, options.model.dtype)

    def _load_model(self, dtype: str) -> Any:
        model = self.options.model
        assert model.path is not None
        network = load_causal_lm(model.path, dtype=dtype, device=self.device, trust_remote_code=model.trust_remote_code)
        check_vocabulary(self._reading.tokenizer, network)
        return network

    def _build_manager(self, rollout: RolloutOptions, model: Any) -> AgentLoopManager:
        engine = build_engine(self.options, model, self.tokenizer)
        context = AgentContext(
            config=self.options.config,
            options=rollout,
            tokenizer=self.tokenizer,
            chat=self._reading.chat,
            parser=ToolParser.get_tool_parser(rollout.multi_turn.format, self.tokenizer),
            **vars(self._parts if rollout.multi_turn.enable else AgentParts()),
            tracer=self._build_tracer(rollout),
            processor=self._reading.processor,
            images=self._reading.images,
        )
        scorer = build_scorer(self.options, self.tokenizer) if rollout.mode == "async" else None
        return AgentLoopManager(context, engine, scorer, deterministic=self.options.deterministic)

    def _build_tracer(self, rollout: RolloutOptions) -> Tracer | None:
        run = (self.options.config or {}).get("trainer") or {}
        return Tracer.of(rollout.trace, run.get("project_name", "etude"), run.get("experiment_name", "default"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_progress(self, on_progress: Callable[[int, int], None] | None) -> None:
        """Whom to tell, as (finished, total), about trajectories of a rollout under way."""
        self._manager.on_progress = on_progress

    # -- rollout -------------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, data: DataProto) -> DataProto:
        """Rolls out each row once.

        Needs the dataset's object columns, `uid`, and in meta_info `seed` (of this batch) and `validate`; there may be
        `least_group`, the survivors of a `uid` that are of use (see `AgentLoopManager.generate`), and `greedy`. Returns the
        columns of `etude.agents.to_batch`, in the rows' order; dropped rows have an all-zero mask. `meta_info` gains
        `metrics`, the engine's figures.
        """
        rollout, validate = self.options.rollout, bool(data.meta_info.get("validate"))
        chosen: Any = rollout.val_kwargs if validate else rollout
        greedy = data.meta_info.get("greedy") or not chosen.do_sample
        temperature = 0.0 if greedy else chosen.temperature
        sampling = Sampling(temperature, chosen.top_p, chosen.top_k, int(data.meta_info["seed"]))
        rows = rows_of(data)
        for row in rows:
            row["active_tools"] = active_tools(row, list(self._manager.context.tools))
            row |= {"validate": validate, "step": data.meta_info.get("step")}
        self._run(self._link.ready())
        least = int(data.meta_info.get("least_group", 1))
        results = self._run(self._manager.generate(rows, sampling, least_group=least))
        self._run(self._link.rest())
        batch = to_batch(results, self.tokenizer.pad_token_id or 0)
        batch.meta_info["metrics"] = self._manager.engine.metrics()
        return batch

    def _run(self, work: Any) -> Any:
        """Runs a coroutine to its end; an interrupt cancels it, which releases its tools, before it is raised."""
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            task.cancel()
            for _ in range(_MOST_INTERRUPTS):
                with suppress(KeyboardInterrupt):
                    self._loop.run_until_complete(asyncio.wait({task}))
                    break
            raise

    # -- learning ------------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs`, `entropys` and, where meta_info says so, `sum_pi_squared` (batch, response_len) of the current
        weights, at meta_info's `temperature`."""
        squares = bool(data.meta_info.get("sum_pi_squared"))
        found = self._actor.log_probs(data, data.meta_info["temperature"], sum_pi_squared=squares)
        return DataProto.from_single_dict(dict(zip(("old_log_probs", "entropys", "sum_pi_squared"), found)))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` (batch, response_len) of the reference policy: the model as it was at the start."""
        if self._ref is None:
            raise ConfigError("no reference policy was loaded: nothing in the configuration uses one")
        return DataProto.from_single_dict({"ref_log_prob": self._ref.log_probs(data, data.meta_info["temperature"])[0]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> Metrics:
        """PPO epochs over mini-batches; meta_info: `temperature`, `global_step`, and `compare_rollout`: whether the first
        update's own log-probs are compared with the engine's. Returns metrics named `actor/*`."""
        actor, temperature = self.options.actor, data.meta_info["temperature"]
        self._actor_optimizer.training_step = data.meta_info["global_step"]
        before_any_update = [self._compared_loss] if data.meta_info.get("compare_rollout") else []
        losses = chain(before_any_update, repeat(self._loss))

        def update(mini: DataProto) -> Metrics:
            entropy_grad = actor.entropy_coeff != 0
            metrics = self._actor.update(mini, next(losses), temperature, entropy_grad, actor.loss_agg_mode)
            return {name if "/" in name else f"actor/{name}": metric for name, metric in metrics.items()}

        metrics = update_epochs(
            data,
            update,
            epochs=actor.ppo_epochs,
            groups=actor.ppo_mini_batch_size,
            shuffle=actor.shuffle,
            seed=actor.data_loader_seed,
        )
        self._updates += 1
        synced = self._run(self._link.push(self._updates))
        return metrics | synced

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_sft(self, data: DataProto) -> Metrics:
        """One supervised step on tokenised demonstrations (`etude.training.demonstrations_to_batch`); meta_info:
        `global_step`."""
        self._actor_optimizer.training_step = data.meta_info["global_step"]
        metrics = sft_step(self._actor, data)
        self._updates += 1
        self._link.changed(self._updates)
        return {f"sft/{name}": metric for name, metric in metrics.items()}

    def _compared_loss(
        self, log_probs: Tensor, entropy: Tensor, micro: DataProto, scale: LossScale
    ) -> tuple[Tensor, Metrics]:
        loss, metrics = self._loss(log_probs, entropy, micro, scale)
        columns = micro.batch
        return loss, metrics | rollout_mismatch(log_probs, columns["rollout_log_probs"], columns["response_mask"])

    def _loss(self, log_probs: Tensor, entropy: Tensor, micro: DataProto, scale: LossScale) -> tuple[Tensor, Metrics]:
        """The actor's objective on one micro-batch: policy loss, entropy bonus, KL to the reference."""
        actor, columns = self.options.actor, micro.batch
        assert columns is not None
        mask = columns["response_mask"]
        scaling: dict[str, Any] = {
            "batch_num_tokens": scale.batch_num_tokens,
            "global_batch_size": scale.global_batch_size,
            "loss_scale_factor": actor.loss_scale_factor or self.options.rollout.response_length,
        }
        # Without old log-probs the batch gets a single update, and its own log-probs are the old ones.
        old = columns.get("old_log_probs", log_probs.detach())
        loss, figures = policy_loss(
            actor.policy_loss.loss_mode,
            old_log_prob=old,
            log_prob=log_probs,
            advantages=columns["advantages"],
            response_mask=mask,
            loss_agg_mode=actor.loss_agg_mode,
            **{need: columns[need] for need in POLICY_LOSSES.get(actor.policy_loss.loss_mode).needs},
            **actor.loss_options(),
            **scaling,
        )
        metrics: Metrics = {**figures, "pg_loss": scale.as_mean(loss, mask)}
        metrics["entropy"] = float(masked_mean(entropy.detach(), mask))
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * agg_loss(entropy, mask, actor.loss_agg_mode, **scaling)
        if actor.use_kl_loss:
            penalty = kl_penalty(log_probs, columns["ref_log_prob"], actor.kl_loss_type)
            loss = loss + actor.kl_loss_coef * agg_loss(penalty, mask, actor.loss_agg_mode, **scaling)
            metrics["kl_loss"] = float(masked_mean(penalty.detach(), mask))
        return loss, metrics

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Writes `actor/huggingface` (a folder any Hugging Face program loads) and `actor/optimizer.pt`."""
        if self.rank == 0:
            target = Path(folder) / "actor"
            save_pretrained(self.model, self._reading.processor or self.tokenizer, target / "huggingface")
            state = {"optimizer": self._actor_optimizer.state_dict(), "updates": self._updates}
            write_tensors(state, target / "optimizer.pt")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Restores weights, in place, and the optimizer's state, bit for bit.

        Raises:
            ConfigError, CheckpointError: the folder's model, or its optimizer's state, cannot be read.
        """
        source = Path(folder) / "actor"
        model = self.options.model
        saved = load_causal_lm(
            source / "huggingface", dtype=model.dtype, device=self.device, trust_remote_code=model.trust_remote_code
        )
        state = read_tensors(source / "optimizer.pt", self.device)
        self.model.load_state_dict(saved.state_dict())
        self._actor_optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]
        self._link.changed(self._updates)

    @property
    def _actor_optimizer(self) -> OptimizerSet:
        assert self._actor.optimizer is not None
        return self._actor.optimizer
