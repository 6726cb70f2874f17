"""Options of the roles; field names are the configuration keys of their sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.agents import RolloutOptions
from etude.algorithms import LOSS_AGG_MODES, POLICY_LOSSES
from etude.algorithms.kl import KL_KINDS
from etude.chat import TOOL_PARSERS
from etude.errors import ConfigError
from etude.inference import ENGINES, check_serving
from etude.registry import Registry, did_you_mean
from etude.rewards import REWARD_MANAGERS
from etude.training import OptimOptions


@dataclass(frozen=True)
class ModelOptions:
    """`actor_rollout_ref.model`."""

    path: str | None = None
    dtype: str = "float32"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class PolicyLossOptions:
    """`actor_rollout_ref.actor.policy_loss`."""

    loss_mode: str = "vanilla"


@dataclass(frozen=True)
class ActorOptions:
    """`actor_rollout_ref.actor`. `ppo_mini_batch_size` counts prompts, `ppo_max_token_len_per_gpu` tokens."""

    ppo_mini_batch_size: int = 64
    ppo_max_token_len_per_gpu: int = 16384
    ppo_epochs: int = 1
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    shuffle: bool = True
    data_loader_seed: int = 42
    policy_loss: PolicyLossOptions = field(default_factory=PolicyLossOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)

    def __post_init__(self) -> None:
        _check_updates("actor", self)
        check_kl_kind("actor_rollout_ref.actor.kl_loss_type", self.kl_loss_type)
        if self.kl_loss_type in ("kl", "k1"):
            raise ConfigError(
                f"actor_rollout_ref.actor.kl_loss_type={self.kl_loss_type} has a gradient of zero in expectation: set "
                "kl_loss_type=kl+ (the same value, with a gradient), k2 or low_var_kl"
            )


@dataclass(frozen=True)
class RefOptions:
    """`actor_rollout_ref.ref`."""

    log_prob_max_token_len_per_gpu: int = 16384


@dataclass(frozen=True)
class ValueModelOptions:
    """`critic.model`."""

    path: str | None = None


@dataclass(frozen=True)
class CriticOptions:
    """`critic`."""

    model: ValueModelOptions = field(default_factory=ValueModelOptions)
    optim: OptimOptions = field(default_factory=lambda: OptimOptions(lr=1e-5))
    ppo_mini_batch_size: int = 64
    ppo_epochs: int = 1
    ppo_max_token_len_per_gpu: int = 16384
    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"

    def __post_init__(self) -> None:
        _check_updates("critic", self)


def _check_updates(section: str, options: ActorOptions | CriticOptions) -> None:
    mode = options.loss_agg_mode
    if mode not in LOSS_AGG_MODES:
        raise ConfigError(f"{section}.loss_agg_mode: unknown mode '{mode}'{did_you_mean(mode, LOSS_AGG_MODES)}")
    if min(options.ppo_mini_batch_size, options.ppo_max_token_len_per_gpu, options.ppo_epochs) < 1:
        raise ConfigError(f"{section}.ppo_mini_batch_size, ppo_max_token_len_per_gpu and ppo_epochs must be at least 1")


def check_kl_kind(key: str, kind: str) -> None:
    """Refuses the estimator `kind` of a KL distance, set at `key`, if there is none of that name.

    Raises:
        ConfigError: names the key and the nearest kind.
    """
    if kind.removesuffix("+") not in KL_KINDS:
        raise ConfigError(f"{key}: unknown kind '{kind}'{did_you_mean(kind, KL_KINDS)} (known: {', '.join(KL_KINDS)})")


@dataclass(frozen=True)
class RewardOptions:
    """`reward_model`."""

    enable: bool = True
    reward_manager: str = "naive"
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_reward_weight: float = 1.0
    score_weight: float = 1.0


@dataclass(frozen=True)
class CustomRewardOptions:
    """`custom_reward_function`."""

    path: str | None = None
    name: str = "compute_score"
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RoleOptions:
    """Everything the workers of one run are built from.

    The learning-rate schedules count training steps: they end after `total_steps`, and the actor's begins at
    `actor_first_step` (after a critic's warm-up). A policy that does not train (`trains`) has no optimizer.
    `needs_ref` says that some loss or reward uses the reference policy. `config` is the whole resolved configuration, handed
    on to users' agent loops and read by nothing of ours. An instance that exists names only what is registered.

    Raises:
        ConfigError: an engine, parser, loss or reward manager of some name does not exist; names key and nearest name.
    """

    model: ModelOptions
    actor: ActorOptions
    rollout: RolloutOptions
    ref: RefOptions = field(default_factory=RefOptions)
    critic: CriticOptions = field(default_factory=CriticOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    custom_reward: CustomRewardOptions = field(default_factory=CustomRewardOptions)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    actor_first_step: int = 0
    trains: bool = True
    needs_ref: bool = False
    deterministic: bool = False
    device: str = "cpu"
    config: Any = None

    def __post_init__(self) -> None:
        engines = [name for name in ENGINES.names() if name != "scripted"]  # that one plays what a test gives it
        if self.rollout.name not in engines:
            near = did_you_mean(self.rollout.name, engines)
            raise ConfigError(
                f"actor_rollout_ref.rollout.name: no engine '{self.rollout.name}'{near} (available: {', '.join(engines)})"
            )
        rollout = self.rollout
        check_serving(rollout.name, rollout.server_urls, rollout.server_api_key_env, rollout.engine_kwargs)
        if rollout.weight_transfer == "cuda_ipc" and (
            rollout.name != "vllm" or rollout.server_urls or not self.device.startswith("cuda")
        ):
            raise ConfigError(
                "actor_rollout_ref.rollout.weight_transfer=cuda_ipc shares the trainer's GPU tensors with vLLM in this "
                "process: it needs rollout.name=vllm without server_urls, and a GPU; use folder"
            )
        _check_name("actor_rollout_ref.rollout.multi_turn.format", TOOL_PARSERS, self.rollout.multi_turn.format)
        _check_name("actor_rollout_ref.actor.policy_loss.loss_mode", POLICY_LOSSES, self.actor.policy_loss.loss_mode)
        if self.reward.enable:
            _check_name("reward_model.reward_manager", REWARD_MANAGERS, self.reward.reward_manager)


def _check_name(key: str, registry: Registry[Any], name: str) -> None:
    try:
        registry.get(name)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
