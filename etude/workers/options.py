"""Options of the roles; field names are the configuration keys of their sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.agents import RolloutOptions
from etude.algorithms import LOSS_AGG_MODES
from etude.errors import ConfigError
from etude.registry import did_you_mean
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

    `total_steps` is the length of the learning-rate schedules in optimizer steps' batches (training steps); `needs_ref`
    says that some loss or reward uses the reference policy. `config` is the whole resolved configuration, handed on to
    users' agent loops and read by nothing of ours.
    """

    model: ModelOptions
    actor: ActorOptions
    ref: RefOptions
    rollout: RolloutOptions
    critic: CriticOptions
    reward: RewardOptions
    custom_reward: CustomRewardOptions
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    needs_ref: bool = False
    deterministic: bool = False
    device: str = "cpu"
    config: Any = None
