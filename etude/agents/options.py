"""Options of rollouts; field names are the configuration keys below `actor_rollout_ref.rollout`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.errors import ConfigError
from etude.trace import TraceOptions


@dataclass(frozen=True)
class MultiTurnOptions:
    """Limits of a conversation; None means no limit."""

    enable: bool = True
    format: str = "hermes"
    tool_config_path: str | list[str] | None = None
    function_tool_path: str | list[str] | None = None
    interaction_config_path: str | None = None
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 8
    max_tool_response_length: int = 2048
    tool_response_length_unit: str = "tokens"
    min_answer_tokens: int = 1
    max_seconds: float | None = None
    malformed_calls: str = "tell"
    malformed_call_penalty: float = 0.1
    tool_response_truncate_side: str = "middle"

    def __post_init__(self) -> None:
        if self.tool_response_truncate_side not in ("left", "middle", "right"):
            raise ConfigError(
                "multi_turn.tool_response_truncate_side must be left, middle or right, "
                f"not '{self.tool_response_truncate_side}'"
            )
        if self.tool_response_length_unit not in ("tokens", "characters"):
            raise ConfigError(
                "multi_turn.tool_response_length_unit must be tokens or characters, "
                f"not '{self.tool_response_length_unit}'"
            )
        if self.malformed_calls not in ("tell", "penalise", "end"):
            raise ConfigError(f"multi_turn.malformed_calls must be tell, penalise or end, not '{self.malformed_calls}'")
        if self.malformed_call_penalty < 0 or (self.max_seconds is not None and not self.max_seconds > 0):
            raise ConfigError("multi_turn.malformed_call_penalty must be at least 0 and max_seconds positive")
        for name in (
            "max_assistant_turns",
            "max_user_turns",
            "max_parallel_calls",
            "max_tool_response_length",
            "min_answer_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"multi_turn.{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class OpenAIAgentOptions:
    """What the agent loop `openai_agent` runs: a function, `path/to/file.py:name`, or a command."""

    function: str | None = None
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.function is not None and self.command:
            raise ConfigError("rollout.agent.openai_agent: set function or command, not both")


@dataclass(frozen=True)
class AgentOptions:
    """Which agent loops there are beside the registered ones, and which a row without `agent_name` gets."""

    default_agent_loop: str | None = None
    agent_loop_config_path: str | None = None
    openai_agent: OpenAIAgentOptions = field(default_factory=OpenAIAgentOptions)

    def __post_init__(self) -> None:
        named = self.openai_agent.function is not None or bool(self.openai_agent.command)
        if self.default_agent_loop == "openai_agent" and not named:
            raise ConfigError(
                "rollout.agent.default_agent_loop=openai_agent needs rollout.agent.openai_agent.function or .command"
            )


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
    stop: tuple[str, ...] | None = None
    prompt_length: int = 1024
    response_length: int = 2048
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    kv_cache_memory_mb: int | None = None
    enable_prefix_caching: bool = True
    dtype: str | None = None
    seed: int = 1
    infrastructure_retries: int = 1
    trajectory_timeout: float = 600.0
    max_concurrent_trajectories: int = 1024
    server_urls: tuple[str, ...] = ()
    server_model: str | None = None
    server_api_key_env: str | None = None
    server_timeout: float = 300.0
    weight_transfer: str = "folder"
    weight_sync_dir: str | None = None
    weight_sync_timeout: float = 600.0
    weight_probe: bool = True
    weight_probe_tolerance: float | None = None
    free_cache_engine: bool = False
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    multi_turn: MultiTurnOptions = field(default_factory=MultiTurnOptions)
    agent: AgentOptions = field(default_factory=AgentOptions)
    trace: TraceOptions = field(default_factory=TraceOptions)
    val_kwargs: ValSamplingOptions = field(default_factory=ValSamplingOptions)

    def __post_init__(self) -> None:
        if self.mode not in ("async", "sync"):
            raise ConfigError(f"rollout.mode must be async or sync, not '{self.mode}'")
        if not all(isinstance(text, str) and text for text in self.stop or ()):
            raise ConfigError(f"rollout.stop must be a list of texts that are not empty, not {self.stop!r:.80}")
        for key, least in (("n", 1), ("max_concurrent_trajectories", 1), ("infrastructure_retries", 0)):
            if getattr(self, key) < least:
                raise ConfigError(f"rollout.{key} must be at least {least}, got {getattr(self, key)}")
        if min(self.prompt_length, self.response_length, self.max_num_seqs, self.max_num_batched_tokens) < 1:
            raise ConfigError(
                "rollout.prompt_length, response_length, max_num_seqs and max_num_batched_tokens must be >= 1"
            )
        if self.kv_cache_memory_mb is not None and self.kv_cache_memory_mb < 1:
            raise ConfigError(f"rollout.kv_cache_memory_mb must be at least 1, not {self.kv_cache_memory_mb}")
        for name in ("trajectory_timeout", "server_timeout", "weight_sync_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"rollout.{name} must be a positive number, not {getattr(self, name)}")
        if self.weight_probe_tolerance is not None and not self.weight_probe_tolerance > 0:
            raise ConfigError(
                f"rollout.weight_probe_tolerance must be a positive number, not {self.weight_probe_tolerance}"
            )
        if self.weight_transfer not in ("folder", "cuda_ipc"):
            raise ConfigError(f"rollout.weight_transfer must be folder or cuda_ipc, not '{self.weight_transfer}'")
