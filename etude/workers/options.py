"""`RoleOptions`: the options that a run's workers are built from, in any process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from etude.errors import ConfigError
from etude.inference import check_serving
from etude.options import (
    ActorOptions,
    CriticOptions,
    CustomRewardOptions,
    DistillationOptions,
    EnvironmentOptions,
    EnvOptions,
    ModelOptions,
    RefOptions,
    RewardOptions,
    RolloutCorrectionOptions,
    RolloutOptions,
)


@dataclass(frozen=True)
class RoleOptions:
    """Everything that the workers of a run are built from: frozen options, dictionaries and strings, so that it pickles.

    `actor_first_step`: the training step at which the actor's learning-rate schedule begins (after the critic's warm-up).
    `needs_ref`: some loss or reward uses the reference policy. `value_head`: the critic is a head on the actor's trunk.
    `teacher`: the folder or server with which a `TeacherWorker` scores. `standalone`: rollout workers are a separate group,
    which gets its weights from the actor's. `streams`: rollouts continue while the policy is trained, on weights of up to
    `adapter_versions` steps. `stall_timeout`: see `etude.agents.manager`. `plugins`, `num_threads`, `seed` (None: unchanged)
    and `deterministic` are settings of the worker's process. `config` is the whole resolved configuration as plain
    containers, for users' agent loops and reward managers.

    Raises:
        ConfigError: the rollout section does not fit its engine or the device; names the key.
    """

    model: ModelOptions
    actor: ActorOptions
    rollout: RolloutOptions
    ref: RefOptions = field(default_factory=RefOptions)
    critic: CriticOptions = field(default_factory=CriticOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    custom_reward: CustomRewardOptions = field(default_factory=CustomRewardOptions)
    env: EnvOptions = field(default_factory=EnvOptions)
    environments: tuple[EnvironmentOptions, ...] = ()
    distillation: DistillationOptions = field(default_factory=DistillationOptions)
    teacher: str | None = None
    correction: RolloutCorrectionOptions = field(default_factory=RolloutCorrectionOptions)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    actor_first_step: int = 0
    needs_ref: bool = False
    value_head: bool = False
    standalone: bool = False
    streams: bool = False
    adapter_versions: int = 1
    stall_timeout: float | None = None
    num_threads: int | None = None
    seed: int | None = None
    deterministic: bool = False
    device: str = "cpu"
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_serving(self.rollout)
        if self.rollout.weight_transfer == "cuda_ipc" and not self.device.startswith("cuda"):
            raise ConfigError("actor_rollout_ref.rollout.weight_transfer=cuda_ipc needs a GPU; use folder")
        if not self.device.startswith("cuda"):
            for key, model in {"actor_rollout_ref.model": self.model, "critic.model": self.critic.model}.items():
                if model.use_liger:
                    raise ConfigError(f"{key}.use_liger=true needs a GPU: Liger's kernels do not run on {self.device}")
        if self.rollout.enable_rollout_routing_replay and self.rollout.name != "native":
            raise ConfigError("actor_rollout_ref.rollout.enable_rollout_routing_replay needs rollout.name=native")

    def user_config(self) -> DictConfig | None:
        """`config` for user code, with attribute access; unknown keys raise."""
        if self.config is None:
            return None
        config = OmegaConf.create(dict(self.config))
        OmegaConf.set_struct(config, True)
        return config
