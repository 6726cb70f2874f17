"""Options of models and their updates: `model`, `actor`, `ref`, `critic`, `optim`."""

from __future__ import annotations

from typing import Any, Literal

from etude.algorithms.records import POLICY_LOSSES, KLLossKind, LossAggMode, PolicyLoss
from etude.options.declare import Names, When, key, options
from etude.options.types import (
    AboveOne,
    BelowOne,
    Count,
    CountOrOff,
    Flag,
    FreeForm,
    Natural,
    NonNegative,
    Number,
    Positive,
    PositiveShare,
    Share,
    Text,
    Texts,
)

Precision = Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]

MUON = When("where name=muon", lambda own, run: own.name == "muon")
LORA = When("with lora_rank above 0", lambda own, run: own.lora_rank > 0)
DECAYING = When(
    "where lr_scheduler_type is linear or cosine", lambda own, run: own.lr_scheduler_type in ("linear", "cosine")
)


def has_several_updates(own: ActorOptions | CriticOptions, train_batch_size: int) -> bool:
    """Whether a full batch takes more than one optimizer step, or its only one at other weights than those it was sampled
    with."""
    return own.ppo_epochs > 1 or train_batch_size > own.ppo_mini_batch_size or own.optim.steps_apart


_SEVERAL = (
    "where a batch gets several updates (ppo_epochs > 1, or ppo_mini_batch_size < data.train_batch_size), or the optimizer "
    "is adamw_schedule_free"
)
SEVERAL_UPDATES = When(_SEVERAL, lambda own, run: has_several_updates(own, run.data.train_batch_size))


def _loss_reads(option: str, *, off_policy: bool = True) -> When:
    """Where the loss reads `option`; `off_policy`: and ratios differ from 1, before which it has no effect."""
    readers = f"with losses that read it (policy_loss.loss_mode={', '.join(POLICY_LOSSES.readers(option))})"
    apart = " where ratios differ from 1: with algorithm.rollout_correction.bypass_mode, or "
    return When(
        readers + (apart + _SEVERAL if off_policy else ""),
        lambda own, run: (
            run.actor_rollout_ref.actor.reads(option)
            and (
                not off_policy
                or SEVERAL_UPDATES.holds(run.actor_rollout_ref.actor, run)
                or run.algorithm.rollout_correction.bypass_mode
            )
        ),
    )


def _own(option: str) -> str:
    """What null means for `option`: each loss's own default, by default first."""
    losses: dict[float, list[str]] = {}
    for name in POLICY_LOSSES.readers(option):
        losses.setdefault(POLICY_LOSSES.built_in[name].defaults[option], []).append(name)
    return "Null: the loss's own, " + ", ".join(f"{value:g} ({', '.join(of)})" for value, of in losses.items()) + "."


def _own_modes() -> str:
    modes: dict[str, list[str]] = {}
    for name, record in POLICY_LOSSES.built_in.items():
        modes.setdefault(record.loss_agg_mode, []).append(name)
    usual, *rest = sorted(modes, key=lambda mode: -len(modes[mode]))
    return ", ".join([*(f"{mode} ({', '.join(modes[mode])})" for mode in rest), f"else {usual}"])


KL_LOSS = When("with use_kl_loss=true", lambda own, run: own.use_kl_loss)
MIXED = When(
    "where a batch is cut into several mini-batches (ppo_mini_batch_size < data.train_batch_size)",
    lambda own, run: own.ppo_mini_batch_size < run.data.train_batch_size,
)


@options
class OptimOptions:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon", "adamw_8bit", "adamw_schedule_free"] = key(
        "muon is for weight matrices, with AdamW for the rest. adamw_8bit (bitsandbytes) keeps its moments in 8 bits, "
        "adamw_schedule_free (schedulefree) averages weights in place of a decaying rate.",
        default="adamw",
    )
    lr: NonNegative = key(
        "Peak learning rate. The quickstart's pretrained model of 135 million parameters learns at 2e-5, with LoRA at "
        "5e-4, and not in so few steps at 1e-6.",
        default=1e-6,
    )
    betas: tuple[BelowOne, BelowOne] = key(
        "Decay rates of the two moments of Adam's gradients. Muon's matrices have none of their own.",
        default=(0.9, 0.999),
    )
    weight_decay: NonNegative = key("Decoupled weight decay.", default=0.01)
    muon_lr_multiplier: Positive = key(
        "Muon's learning rate as a multiple of `lr`: its updates have unit scale, Adam's do not.",
        default=10.0,
        when=MUON,
    )
    lr_warmup_steps: Natural = key(
        "Training steps over which the rate rises from 0 to its peak.",
        default=0,
        verl_default="-1",
        verl_meaning="-1 and null leave it to lr_warmup_steps_ratio",
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key("After warm-up.", default="constant")
    lr_decay_ratio: PositiveShare = key(
        "Share of the run, at its end, over which the rate decays; it is held before. At most what warm-up leaves.",
        default=1.0,
        when=DECAYING,
    )
    min_lr_ratio: Share = key("Final rate as a share of the peak.", default=0.0, when=DECAYING)
    offload: Flag = key(
        "Keep the float32 weights, their gradients and the optimizer's state in the CPU's memory, and take the step there: "
        "a GPU keeps the rounded weights alone. With strategy=fsdp2 the weights go too, as with param_offload.",
        default=False,
    )
    clip_grad: Positive | None = key(
        "Largest gradient norm; longer gradients are scaled down to it. Null: none is.", default=1.0
    )

    def __post_init__(self) -> None:
        if self.name == "adamw_schedule_free" and (self.lr_scheduler_type != "constant" or not self.betas[0]):
            raise ValueError("name=adamw_schedule_free needs lr_scheduler_type=constant and betas[0] above 0")

    @property
    def steps_apart(self) -> bool:
        """Whether gradients are taken at other weights than those that sample, score and are saved."""
        return self.name == "adamw_schedule_free"


@options
class CriticOptimOptions(OptimOptions):
    """Optimizer and learning-rate schedule of the critic."""

    lr: NonNegative = key(
        "Peak learning rate; values are regressed, so it may be larger than the policy's.", default=1e-5
    )


@options
class SFTOptimOptions(OptimOptions):
    """Optimizer and learning-rate schedule."""

    lr: NonNegative = key(
        "Peak learning rate; ten times that of reinforcement learning, since the targets are given rather than sampled.",
        default=1e-5,
    )


@options
class TrainedModelOptions:
    """A model that is trained: where it starts from, and what its training costs."""

    path: Text | None = key(
        "Folder, GGUF file, name of `etude models list`, or hub name `org/name` where a hub is reachable. Needed to train.",
        default=None,
        path="model",
        verl_default="~/models/deepseek-llm-7b-chat",
    )
    enable_gradient_checkpointing: Flag | None = key(
        "Keep only the layers' inputs for the backward pass, and compute each layer again there: less memory, about a third "
        "more time, the same gradients. Null: where an update would not fit the free memory otherwise, by the estimate of "
        "`etude check`; off in supervised training.",
        default=None,
        verl_default="true",
    )
    enable_activation_offload: Flag = key(
        "Keep what checkpointing keeps, the layers' inputs, in the CPU's memory rather than a GPU's. Switches "
        "enable_gradient_checkpointing on.",
        default=False,
    )
    use_liger: Flag = key(
        "Run norms, rotary embeddings and feed-forward layers with Liger's kernels. GPUs only.", default=False
    )
    lora_rank: Natural = key(
        "Rank of LoRA's adapters, which are trained in place of the weights. 0: all weights are trained.", default=0
    )
    lora_alpha: Positive = key(
        "Their scale: what they add is multiplied by lora_alpha / lora_rank.", default=16.0, when=LORA
    )
    target_modules: Texts = key(
        "The linear layers that get one, by the last part of their names (q_proj …). all-linear: all but the head.",
        default=("all-linear",),
        when=LORA,
        verl_default="all-linear",
    )
    exclude_modules: Text | None = key(
        "Those of them that get none: a regular expression for whole names (`.*visual.*`).", default=None, when=LORA
    )
    quantization: Literal["nf4"] | None = key(
        "Weights of the frozen linear layers in 4 bits (QLoRA), through bitsandbytes. Null: in `dtype`.",
        default=None,
        when=LORA,
    )

    def __post_init__(self) -> None:
        if self.enable_activation_offload and self.enable_gradient_checkpointing is False:
            raise ValueError("enable_activation_offload=true needs enable_gradient_checkpointing, which is false")

    @property
    def checkpointing(self) -> bool | None:
        """Whether gradient checkpointing is on; None: where memory needs it."""
        return self.enable_activation_offload or self.enable_gradient_checkpointing


@options
class ModelOptions(TrainedModelOptions):
    """The language model: a folder in Hugging Face format (config, weights, tokenizer with a chat template)."""

    dtype: Precision | Literal["auto"] = key(
        "Type of the arithmetic. The weights that the optimizer moves are float32 in any case. auto: bfloat16 on a GPU, and "
        "float32, the exact and quick choice, on a CPU.",
        default="auto",
    )
    trust_remote_code: Flag = key(
        "Run Python code that comes with the model. False: such a model is refused.", default=False
    )

    def dtype_on(self, device: str) -> Precision:
        """`dtype` as it is on `device`."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if device == "cpu" else "bfloat16"


@options
class FSDPOptions:
    """How the ranks share a model."""

    fsdp_size: CountOrOff = key(
        "Ranks that share one copy of the model; as many copies as fit the ranks are kept (HSDP). -1: all share one.",
        default=-1,
        unit="ranks",
    )
    tensor_parallel_size: Count = key(
        "Ranks that compute each layer together, on the same rows, by Transformers' plan for the family; dense models, "
        "without LoRA.",
        default=1,
        unit="ranks",
    )
    param_offload: Flag = key(
        "Keep weights, gradients and the optimizer's state in the CPU's memory between uses.", default=False
    )
    reshard_after_forward: Flag = key(
        "Give a layer's gathered weights back after its forward pass and gather them again for the backward pass: less "
        "memory, more traffic. False: keep them.",
        default=True,
    )


Strategy = Literal["ddp", "fsdp2", "fsdp"]
_STRATEGY = (
    "How several ranks hold the model. ddp: each has all of it, and gradients are summed; fsdp2: each has a part of its "
    "weights, gradients and optimizer state (fsdp is another name of it). Changes memory and speed, no result."
)
_SEQUENCE = (
    "Ranks that compute each row together, attention divided by heads and the rest by tokens: for contexts that one "
    "rank's memory cannot hold. Changes memory and speed, no result; on a single rank nothing."
)
OWN_TRUNK = When("with critic.share_trunk=false", lambda own, run: not run.critic.share_trunk)
LEARNS_ALONE = When(
    "with critic.share_trunk=false, or while trainer.critic_warmup lasts",
    lambda own, run: not own.share_trunk or run.trainer.critic_warmup > 0,
)
SHARDED = When(
    "with strategy=fsdp2, on several ranks", lambda own, run: own.strategy != "ddp" and run.trainer.ranks > 1
)


@options
class PolicyLossOptions:
    """Which policy loss."""

    loss_mode: Text = key(
        "A registered name; vanilla is PPO's clipped ratio.",
        default="vanilla",
        names=Names("etude.algorithms.records:POLICY_LOSSES"),
    )
    loss_kwargs: FreeForm = key(
        "Options that are no keys: vespo's k_pos, lambda_pos, k_neg and lambda_neg, or those of a loss of yours.",
        default_factory=dict,
    )
    clip_cov_ratio: PositiveShare | None = key(
        f"Share of a mini-batch's tokens that clip_cov leaves out. {_own('clip_cov_ratio')}",
        default=None,
        when=_loss_reads("clip_cov_ratio", off_policy=False),
        verl_default="0.0002",
    )
    clip_cov_lb: Number | None = key(
        f"Their covariance of advantage and log-prob lies above this. {_own('clip_cov_lb')}",
        default=None,
        when=_loss_reads("clip_cov_lb", off_policy=False),
        verl_default="1.0",
    )
    clip_cov_ub: Number | None = key(
        f"And below this. {_own('clip_cov_ub')}",
        default=None,
        when=_loss_reads("clip_cov_ub", off_policy=False),
        verl_default="5.0",
    )
    kl_cov_ratio: PositiveShare | None = key(
        "Share of a mini-batch's tokens that kl_cov penalises: those whose covariance is largest. "
        f"{_own('kl_cov_ratio')}",
        default=None,
        when=_loss_reads("kl_cov_ratio"),
        verl_default="0.0002",
    )
    ppo_kl_coef: NonNegative | None = key(
        f"Weight of |log ratio| on them. {_own('ppo_kl_coef')}",
        default=None,
        when=_loss_reads("ppo_kl_coef"),
        verl_default="0.1",
    )
    dro_beta: Positive | None = key(
        "Weight of dro's squared log ratio; dro has no default of its own.",
        default=None,
        when=_loss_reads("dro_beta", off_policy=False),
    )

    def __post_init__(self) -> None:
        own = self.record.defaults if self.record else {}
        low = own.get("clip_cov_lb") if self.clip_cov_lb is None else self.clip_cov_lb
        high = own.get("clip_cov_ub") if self.clip_cov_ub is None else self.clip_cov_ub
        if low is not None and high is not None and low >= high:
            raise ValueError(f"clip_cov_lb={low:g} must be below clip_cov_ub={high:g}")

    @property
    def record(self) -> PolicyLoss | None:
        """The record of `loss_mode`; None where nothing is registered under that name, or nothing yet."""
        return POLICY_LOSSES.find(self.loss_mode)


@options
class ActorOptions:
    """The policy's update."""

    ppo_mini_batch_size: Count = key(
        "Prompts (with all their answers) an optimizer step.", default=64, unit="prompts", verl_default="256"
    )
    ppo_max_token_len_per_gpu: Count = key(
        "Size of a micro-batch: bounds memory, changes no result. What several rows begin with counts once; one longer "
        "row makes a micro-batch of its own.",
        default=16384,
        unit="tokens",
    )
    ppo_epochs: Count = key("Passes over each batch.", default=1)
    clip_ratio: NonNegative | None = key(
        "clip_ratio_low and clip_ratio_high at once, where these are null.",
        default=None,
        when=_loss_reads("clip_ratio"),
        verl_default="0.2",
        verl_meaning="never has an effect",
    )
    clip_ratio_low: NonNegative | None = key(
        "How far the probability ratio may fall below 1 (dppo: the divergence, geo_mean: the log ratio below 0); from 1 on "
        f"there is no bound. {_own('clip_ratio_low')}",
        default=None,
        when=_loss_reads("clip_ratio_low"),
        verl_default="0.2",
    )
    clip_ratio_high: NonNegative | None = key(
        f"How far it may rise above. {_own('clip_ratio_high')}",
        default=None,
        when=_loss_reads("clip_ratio_high"),
        verl_default="0.2",
    )
    clip_ratio_c: AboveOne | None = key(
        f"Dual clip: bound on the ratio where the advantage is negative (dppo: on every ratio). {_own('clip_ratio_c')}",
        default=None,
        when=_loss_reads("clip_ratio_c"),
        verl_default="3.0",
    )
    tau_pos: Positive | None = key(
        f"Steepness of sapo's gate where the advantage is positive. {_own('tau_pos')}",
        default=None,
        when=_loss_reads("tau_pos"),
        verl_default="1.0",
    )
    tau_neg: Positive | None = key(
        f"Where it is not. {_own('tau_neg')}", default=None, when=_loss_reads("tau_neg"), verl_default="1.05"
    )
    entropy_coeff: Number = key("Weight of the entropy bonus; below 0, entropy is a cost.", default=0.0)
    use_kl_loss: Flag = key("Add the KL distance from the reference policy to the loss.", default=False)
    kl_loss_coef: NonNegative = key("Weight of that term.", default=0.001, when=KL_LOSS)
    kl_loss_type: KLLossKind = key(
        "Its estimator: abs, mse (k2), low_var_kl (k3); with a trailing + (kl+, k3+ …) the k2 gradient. kl (k1) alone has "
        "none in expectation.",
        default="low_var_kl",
        when=KL_LOSS,
    )
    router_aux_loss_coef: NonNegative = key(
        "Weight of the load-balancing loss of a mixture's routers (Switch Transformer's), over the whole mini-batch; above "
        "0 an update takes one more forward pass. 0: off, whatever the model's configuration says.",
        default=0.0,
    )
    loss_agg_mode: LossAggMode | None = key(
        "How token losses become one number. token-mean weighs every sampled token alike; seq-mean-… average over rollouts. "
        f"Null: the loss's own, {_own_modes()}.",
        default=None,
        verl_default="token-mean",
    )
    loss_scale_factor: Positive | None = key(
        "Divisor of seq-mean-token-sum-norm. Null: rollout.response_length, the longest answer allowed.",
        default=None,
        unit="tokens",
        when=When(
            "with loss_agg_mode=seq-mean-token-sum-norm",
            lambda own, run: own.loss_agg_mode == "seq-mean-token-sum-norm",
        ),
    )
    shuffle: Flag = key(
        "Mix the rows before they are cut into mini-batches.", default=True, when=MIXED, verl_default="false"
    )
    data_loader_seed: Natural = key(
        "Seed of that mixing.",
        default=1,
        written="${trainer.seed}",
        when=When(
            "with shuffle=true and several mini-batches a batch", lambda own, run: own.shuffle and MIXED.holds(own, run)
        ),
        verl_default="42",
    )
    policy_loss: PolicyLossOptions = key("", default_factory=PolicyLossOptions)
    optim: OptimOptions = key("", default_factory=OptimOptions)
    ulysses_sequence_parallel_size: Count = key(
        f"{_SEQUENCE} The reference's rows are divided alike.", default=1, unit="ranks"
    )
    strategy: Strategy = key(f"{_STRATEGY} The reference is held alike.", default="ddp", verl_default="fsdp")
    fsdp_config: FSDPOptions = key("", default_factory=FSDPOptions, when=SHARDED)

    @property
    def aggregation(self) -> LossAggMode:
        """`loss_agg_mode`, or the loss's own."""
        record = self.policy_loss.record
        return self.loss_agg_mode or (record.loss_agg_mode if record else "token-mean")

    @property
    def needs(self) -> frozenset[str]:
        """The columns beyond a rollout's that the update reads: of the loss, and of the KL in it."""
        record = self.policy_loss.record
        return frozenset(record.needs if record else ()) | ({"ref_log_prob"} if self.use_kl_loss else set())

    def reads(self, option: str) -> bool:
        """Whether the loss reads `option`, as far as is known before plugins are imported."""
        return POLICY_LOSSES.reads(self.policy_loss.loss_mode, option)

    def loss_options(self) -> dict[str, Any]:
        """What the policy loss is called with beside columns and counts.

        Raises:
            ConfigError: `policy_loss.loss_kwargs` are not its own.
        """
        loss = self.policy_loss
        return POLICY_LOSSES.settings(loss.loss_mode, self, loss, own=loss.loss_kwargs)


@options
class SFTLossOptions:
    """What is learned from."""

    name: Literal["sft", "dpo"] = key(
        "sft: imitate; dpo: prefer the better of two rollouts of a prompt, from rollout dumps.", default="sft"
    )
    beta: Positive = key(
        "Weight of the log-probs in DPO's margin; larger keeps the policy closer to the reference, the model at the start.",
        default=0.1,
        when=When("with name=dpo", lambda own, run: own.name == "dpo"),
    )


@options
class RefOptions:
    """The frozen reference policy. It is built only where a KL term, an estimator or a loss asks for it."""

    log_prob_max_token_len_per_gpu: Count = key(
        "Size of a forward micro-batch: bounds memory, changes no result.",
        default=16384,
        unit="tokens",
        when=When(
            "with actor.use_kl_loss, algorithm.use_kl_in_reward, or an estimator or loss that needs ref_log_prob",
            lambda own, run: run.may_need("ref_log_prob"),
        ),
    )


@options
class ValueModelOptions(TrainedModelOptions):
    """Where its body starts from, and how it is trained."""

    path: Text | None = key(
        "Folder in Hugging Face format; the head starts at zero.",
        default=None,
        written="${actor_rollout_ref.model.path}",
        path="model",
        verl_default="~/models/deepseek-llm-7b-chat",
    )


@options
class CriticOptions:
    """The value model; built only where the advantage estimator needs values."""

    share_trunk: Flag = key(
        "Values come from a head on the policy's hidden states, and their loss is part of the actor's update: one model, "
        "one forward pass. `optim` is the head's; in critic_warmup the head learns alone.",
        default=False,
    )
    vf_coef: NonNegative = key(
        "Weight of the value loss in the actor's update: how much of the trunk's gradient is the values'.",
        default=0.1,
        when=When("with critic.share_trunk=true", lambda own, run: own.share_trunk),
    )
    model: ValueModelOptions = key("", default_factory=ValueModelOptions, when=OWN_TRUNK)
    optim: OptimOptions = key("", default_factory=CriticOptimOptions)
    ppo_mini_batch_size: Count = key(
        "Prompts (with all their answers) an optimizer step.",
        default=64,
        written="${actor_rollout_ref.actor.ppo_mini_batch_size}",
        unit="prompts",
        when=LEARNS_ALONE,
        verl_default="256",
    )
    ppo_epochs: Count = key("Passes over each batch.", default=1, when=LEARNS_ALONE)
    ppo_max_token_len_per_gpu: Count = key(
        "Size of a micro-batch: bounds memory, changes no result.",
        default=16384,
        unit="tokens",
        verl_default="32768",
    )
    cliprange_value: NonNegative = key(
        "Clip range of a value around its old value.",
        default=0.5,
        when=When(
            _SEVERAL,
            lambda own, run: has_several_updates(
                run.actor_rollout_ref.actor if own.share_trunk else own, run.data.train_batch_size
            ),
        ),
    )
    loss_agg_mode: LossAggMode = key(
        "How token losses become one number (see actor.loss_agg_mode).", default="token-mean"
    )
    ulysses_sequence_parallel_size: Count = key(
        _SEQUENCE,
        default=1,
        written="${actor_rollout_ref.actor.ulysses_sequence_parallel_size}",
        when=OWN_TRUNK,
        unit="ranks",
    )
    strategy: Strategy = key(
        _STRATEGY, default="ddp", written="${actor_rollout_ref.actor.strategy}", when=OWN_TRUNK, verl_default="fsdp"
    )
    fsdp_config: FSDPOptions = key("", default_factory=FSDPOptions, when=SHARDED)
