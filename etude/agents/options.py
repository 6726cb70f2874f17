"""Options of rollouts; field names are the configuration keys below `actor_rollout_ref.rollout`."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.errors import ConfigError


@dataclass(frozen=True)
class MultiTurnOptions:
    """Limits of a conversation; None means no limit. `max_tool_response_length` counts tokens."""

    enable: bool = True
    format: str = "hermes"
    tool_config_path: str | list[str] | None = None
    function_tool_path: str | list[str] | None = None
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 8
    max_tool_response_length: int = 2048
    tool_response_truncate_side: str = "middle"

    def __post_init__(self) -> None:
        if self.tool_response_truncate_side not in ("left", "middle", "right"):
            raise ConfigError(
                "multi_turn.tool_response_truncate_side must be left, middle or right, "
                f"not '{self.tool_response_truncate_side}'"
            )
        for name in ("max_assistant_turns", "max_user_turns", "max_parallel_calls", "max_tool_response_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"multi_turn.{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class ValSamplingOptions:
    """How validation samples: greedy by default."""

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    do_sample: bool = False


@dataclass(frozen=True)
class RolloutOptions:
    """One rollout worker's options. Lengths are tokens, times seconds."""

    name: str = "native"
    mode: str = "async"
    n: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    do_sample: bool = True
    prompt_length: int = 1024
    response_length: int = 2048
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    seed: int = 1
    infrastructure_retries: int = 1
    trajectory_timeout: float = 600.0
    max_concurrent_trajectories: int = 1024
    multi_turn: MultiTurnOptions = field(default_factory=MultiTurnOptions)
    val_kwargs: ValSamplingOptions = field(default_factory=ValSamplingOptions)

    def __post_init__(self) -> None:
        if self.mode not in ("async", "sync"):
            raise ConfigError(f"rollout.mode must be async or sync, not '{self.mode}'")
        if self.n < 1 or self.infrastructure_retries < 0 or self.max_concurrent_trajectories < 1:
            raise ConfigError("rollout.n and max_concurrent_trajectories must be >= 1, infrastructure_retries >= 0")
        if min(self.prompt_length, self.response_length, self.max_num_seqs, self.max_num_batched_tokens) < 1:
            raise ConfigError(
                "rollout.prompt_length, response_length, max_num_seqs and max_num_batched_tokens must be >= 1"
            )
        if not self.trajectory_timeout > 0:
            raise ConfigError(f"rollout.trajectory_timeout must be a positive number, not {self.trajectory_timeout}")
