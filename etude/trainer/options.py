"""Options of the training loop; field names are the configuration keys of `algorithm` and `trainer`."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.algorithms import ADVANTAGE_ESTIMATORS
from etude.errors import ConfigError
from etude.workers.options import check_kl_kind


@dataclass(frozen=True)
class KLCtrlOptions:
    """`algorithm.kl_ctrl`."""

    type: str = "fixed"
    kl_coef: float = 0.001
    horizon: int = 10_000
    target_kl: float = 0.1


@dataclass(frozen=True)
class FilterGroupsOptions:
    """`algorithm.filter_groups`: leave out groups without spread; `max_num_gen_batches` > 1 refills the batch."""

    enable: bool = False
    max_num_gen_batches: int = 1


@dataclass(frozen=True)
class RolloutCorrectionOptions:
    """`algorithm.rollout_correction`: `bypass_mode` takes the engine's log-probs as the old ones."""

    bypass_mode: bool = False


@dataclass(frozen=True)
class AlgorithmOptions:
    """`algorithm`."""

    adv_estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"
    kl_ctrl: KLCtrlOptions = field(default_factory=KLCtrlOptions)
    filter_groups: FilterGroupsOptions = field(default_factory=FilterGroupsOptions)
    rollout_correction: RolloutCorrectionOptions = field(default_factory=RolloutCorrectionOptions)

    def __post_init__(self) -> None:
        try:
            ADVANTAGE_ESTIMATORS.get(self.adv_estimator)
        except ConfigError as error:
            raise ConfigError(f"algorithm.adv_estimator: {error}") from error
        check_kl_kind("algorithm.kl_penalty", self.kl_penalty)
        if self.filter_groups.max_num_gen_batches < 1:
            raise ConfigError("algorithm.filter_groups.max_num_gen_batches must be at least 1")

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator works from values."""
        return self.adv_estimator == "gae"


@dataclass(frozen=True)
class RunOptions:
    """What every run has, supervised or reinforced: its length, place and seed."""

    total_epochs: int = 1
    total_training_steps: int | None = None
    project_name: str = "etude"
    experiment_name: str = "default"
    default_local_dir: str = "runs/etude/default"
    logger: tuple[str, ...] = ("console", "jsonl", "tensorboard")
    save_freq: int = -1
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    max_actor_ckpt_to_keep: int | None = 2
    deterministic: bool = False
    seed: int = 1
    num_threads: int | None = None
    device: str = "auto"
    max_skipped_steps: int = 5

    def __post_init__(self) -> None:
        if self.max_skipped_steps < 1:
            raise ConfigError(f"trainer.max_skipped_steps must be at least 1, not {self.max_skipped_steps}")
        if self.total_epochs < 1 or (self.total_training_steps is not None and self.total_training_steps < 1):
            raise ConfigError("trainer.total_epochs and trainer.total_training_steps must be at least 1")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"trainer.num_threads must be null or at least 1, not {self.num_threads}")
        if self.seed < 0:
            raise ConfigError(f"trainer.seed must not be negative, not {self.seed}")
        if self.resume_mode not in ("auto", "disable", "resume_path"):
            raise ConfigError(f"trainer.resume_mode must be auto, disable or resume_path, not '{self.resume_mode}'")
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path")


@dataclass(frozen=True)
class TrainerOptions(RunOptions):
    """`trainer` of a reinforcement-learning run."""

    test_freq: int = -1
    val_before_train: bool = True
    critic_warmup: int = 0
    rollout_data_dir: str | None = None
    validation_data_dir: str | None = None
    min_valid_fraction: float = 0.5
    report: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_valid_fraction <= 1:
            raise ConfigError(f"trainer.min_valid_fraction must lie in [0, 1], not {self.min_valid_fraction}")
