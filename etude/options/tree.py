"""The whole of a configuration: one class for each tree of keys.

Invariant: the keys of a tree are the fields declared here; the group defaults of `etude.config` are made of these.
"""

from __future__ import annotations

from dataclasses import fields, replace

from etude.options.data import DataOptions, SamplerOptions, SFTDataOptions, TargetSuccessOptions
from etude.options.declare import key, options
from etude.options.distillation import DistillationOptions
from etude.options.environments import EnvironmentOptions, EnvironmentSections
from etude.options.model_path import local_folder, longest_context, read_config
from etude.options.reward import CustomRewardOptions, RewardOptions
from etude.options.rollout import EnvOptions, MultiTurnOptions, RolloutOptions
from etude.options.run import CRITIC, ON_RAY, AlgorithmOptions, RayOptions, RunOptions, TrainerOptions
from etude.options.training import (
    ActorOptions,
    CriticOptions,
    ModelOptions,
    OptimOptions,
    RefOptions,
    SFTLossOptions,
    SFTOptimOptions,
)
from etude.options.types import Flag, Texts
from etude.options.validate import to_options

_PLUGINS = (
    "Files or dotted modules imported in every process before names resolve, so that their @register lines take effect."
)


@options
class PolicyOptions:
    """The policy's roles."""

    model: ModelOptions = key("", default_factory=ModelOptions)
    actor: ActorOptions = key("", default_factory=ActorOptions)
    ref: RefOptions = key("", default_factory=RefOptions)
    rollout: RolloutOptions = key("", default_factory=RolloutOptions)
    hybrid_engine: Flag = key(
        "Each worker both rolls out and trains. False: rollout.nnodes x rollout.n_gpus_per_node processes of their own roll "
        "out, and get the weights from those that train (docs/distributed.md).",
        default=True,
        when=ON_RAY,
    )
    env: EnvOptions = key("", default_factory=EnvOptions)


@options
class TrainOptions:
    """PPO: the root of `etude train` and `python -m etude.trainer.main_ppo`. Each part lives in the group of its name."""

    data: DataOptions = key("", default_factory=DataOptions)
    actor_rollout_ref: PolicyOptions = key("", default_factory=PolicyOptions)
    critic: CriticOptions = key("", default_factory=CriticOptions, when=CRITIC)
    reward_model: RewardOptions = key("", default_factory=RewardOptions)
    custom_reward_function: CustomRewardOptions = key("", default_factory=CustomRewardOptions)
    algorithm: AlgorithmOptions = key("", default_factory=AlgorithmOptions)
    distillation: DistillationOptions = key("", default_factory=DistillationOptions)
    trainer: TrainerOptions = key("", default_factory=TrainerOptions)
    ray: RayOptions = key("", default_factory=RayOptions, when=ON_RAY)
    env: EnvironmentSections = key(
        "What the model acts in: an id, or a list of [{id, name, args, tasks, val_tasks, weight, limit, timeout}] "
        "(docs/environments.md). Without data.train_files its tasks are the rows; of several, a row picks one by "
        "extra_info.env.",
        default=(),
    )
    plugins: Texts = key(_PLUGINS, default=(), path="code")

    @property
    def environments(self) -> tuple[EnvironmentOptions, ...]:
        """The entries of `env`."""
        return tuple(to_options(EnvironmentOptions, each, f"env[{n}]") for n, each in enumerate(self.env))

    @property
    def actor(self) -> ActorOptions:
        """The actor's section, with the loss that `rollout_correction.loss_type` picks."""
        actor, correction = self.actor_rollout_ref.actor, self.algorithm.rollout_correction
        if not correction.bypass_mode or correction.loss_type == "ppo_clip":
            return actor
        return replace(actor, policy_loss=replace(actor.policy_loss, loss_mode=correction.loss_type))

    def for_workers(self) -> TrainOptions:
        """What workers are built from: the same object."""
        return self

    @property
    def model(self) -> ModelOptions:
        """The policy's model."""
        return self.actor_rollout_ref.model

    @property
    def ref(self) -> RefOptions:
        """The reference policy."""
        return self.actor_rollout_ref.ref

    @property
    def rollout(self) -> RolloutOptions:
        """How answers are sampled."""
        return self.actor_rollout_ref.rollout

    @property
    def scores(self) -> bool:
        """Whether a reward manager scores; the environments of `env` do, unless the user names a scorer."""
        custom = self.custom_reward_function
        own = custom.path or custom.rewards or self.reward_model.model.path
        return self.reward_model.scores and bool(own or not self.env)

    @property
    def sampler(self) -> SamplerOptions:
        """What draws the rows: several environments, whose tasks are the rows, are drawn by their weights."""
        given, entries = self.data.sampler, self.environments
        if len(entries) < 2 or self.data.train_files or given.class_name is not None:
            return given
        return replace(given, class_name="mixture", weights={each.label: each.weight for each in entries})

    @property
    def has_rollout_group(self) -> bool:
        """Whether the processes that roll out are others than those that train."""
        return self.trainer.backend == "ray" and not self.actor_rollout_ref.hybrid_engine

    @property
    def needs(self) -> frozenset[str]:
        """The columns that are computed beside what a rollout has (see `etude.algorithms.records`): for the estimator, the
        policy loss, the KL terms, distillation and the correction of what the engine sampled."""
        estimator = self.algorithm.estimator
        own = {"old_log_probs", "ref_log_prob"} if self.algorithm.use_kl_in_reward else set[str]()
        if self.algorithm.rollout_correction.corrects:
            own.add("old_log_probs")
        if self.distillation.teachers:
            own |= {"old_log_probs", "teacher_log_probs"}
        return self.actor.needs.union(own, estimator.needs if estimator else ())

    @property
    def needs_ref(self) -> bool:
        """Whether some loss or reward uses the reference policy."""
        return "ref_log_prob" in self.needs

    @property
    def value_head(self) -> bool:
        """Whether the critic is a head on the actor's trunk."""
        return self.critic.share_trunk and "values" in self.needs

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic with a trunk of its own."""
        return "values" in self.needs and not self.value_head

    @property
    def min_group(self) -> int:
        """Minimum number of surviving rollouts per prompt; prompts with fewer are not trained on."""
        return 1 if self.distillation.alone else self.algorithm.min_group

    @property
    def longest_sequence(self) -> int | None:
        """Maximum tokens of prompt plus response; None if only their separate limits apply."""
        folder = local_folder(str(self.model.path))
        return self.rollout.max_model_len or (longest_context(read_config(folder)) if folder else None)

    def may_need(self, column: str) -> bool:
        """Whether `column` is among them, as far as is known before plugins are imported."""
        unknown = None in (self.algorithm.estimator, self.actor.policy_loss.record)
        return unknown or column in self.needs


@options
class SFTOptions:
    """Supervised fine-tuning on conversations with tool calls: the root of `etude sft`."""

    data: SFTDataOptions = key("", default_factory=SFTDataOptions)
    model: ModelOptions = key("", default_factory=ModelOptions)
    optim: OptimOptions = key("", default_factory=SFTOptimOptions)
    loss: SFTLossOptions = key("", default_factory=SFTLossOptions)
    multi_turn: MultiTurnOptions = key("", default_factory=MultiTurnOptions)
    target_success: TargetSuccessOptions = key("", default_factory=TargetSuccessOptions)
    trainer: RunOptions = key("", default_factory=RunOptions)
    ray: RayOptions = key("", default_factory=RayOptions, when=ON_RAY)
    plugins: Texts = key(_PLUGINS, default=(), path="code")

    def for_workers(self) -> TrainOptions:
        """What workers are built from: the run as `etude train` would have it, with the same model, optimizer, chat template
        and conversations; trials are its rollouts, and DPO's reference that of a KL term."""
        lengths = self.data.max_length, self.target_success.max_response_length
        run = {each.name: getattr(self.trainer, each.name) for each in fields(self.trainer)}
        return TrainOptions(
            data=DataOptions(
                max_prompt_length=lengths[0],
                max_response_length=lengths[1],
                apply_chat_template_kwargs=self.data.apply_chat_template_kwargs,
            ),
            actor_rollout_ref=PolicyOptions(
                model=self.model,
                actor=ActorOptions(optim=self.optim, use_kl_loss=self.loss.name == "dpo"),
                rollout=RolloutOptions(
                    prompt_length=lengths[0],
                    response_length=lengths[1],
                    multi_turn=self.multi_turn,
                    seed=self.trainer.seed,
                ),
            ),
            trainer=TrainerOptions(**run, stall_timeout=None),
            ray=self.ray,
            plugins=self.plugins,
        )


Options = TrainOptions | SFTOptions
"""Those of a run of either kind."""
