"""`RoleOptions`: the sections of a configuration that a run's workers are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.errors import ConfigError
from etude.inference import check_serving
from etude.options import (
    ActorOptions,
    CriticOptions,
    CustomRewardOptions,
    ModelOptions,
    RefOptions,
    RewardOptions,
    RolloutOptions,
)


@dataclass(frozen=True)
class RoleOptions:
    """Everything the workers of one run are built from.

    The learning-rate schedules count training steps: they end after `total_steps`, and the actor's begins at
    `actor_first_step` (after a critic's warm-up). A policy that does not train (`trains`) has no optimizer.
    `needs_ref` says that some loss or reward uses the reference policy. `config` is the whole resolved configuration, handed
    on to users' agent loops and read by nothing of ours.

    Raises:
        ConfigError: the rollout section does not go with its engine, or with the device; names the key.
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
        check_serving(self.rollout)
        if self.rollout.weight_transfer == "cuda_ipc" and not self.device.startswith("cuda"):
            raise ConfigError("actor_rollout_ref.rollout.weight_transfer=cuda_ipc needs a GPU; use folder")
