"""From a resolved configuration to the parts of a run, everything checked before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from etude.agents import MultiTurnOptions, RolloutOptions
from etude.chat import ChatTemplate
from etude.config import to_options
from etude.data import DataOptions, RLDataset
from etude.errors import ConfigError
from etude.models import load_tokenizer
from etude.registry import load_plugins
from etude.rewards.default import scorer_of
from etude.tools import BaseTool, load_function_tools, load_tools
from etude.trainer.options import AlgorithmOptions, RunOptions, TrainerOptions
from etude.workers.options import (
    ActorOptions,
    CriticOptions,
    CustomRewardOptions,
    ModelOptions,
    RefOptions,
    RewardOptions,
    RoleOptions,
)


@dataclass(frozen=True)
class RunSetup:
    """The checked options of a run, its tools, tokenizer and chat template."""

    data: DataOptions
    algorithm: AlgorithmOptions
    trainer: TrainerOptions
    roles: RoleOptions
    tools: dict[str, BaseTool]
    tokenizer: Any
    chat: ChatTemplate
    config: DictConfig

    @property
    def schemas(self) -> dict[str, dict[str, Any]] | None:
        """The configured tools' schemas by name; None when `multi_turn.enable=false`."""
        if not self.roles.rollout.multi_turn.enable:
            return None
        return {name: tool.get_openai_tool_schema().to_openai() for name, tool in self.tools.items()}

    def dataset(self, files: Sequence[str], max_samples: int = -1) -> RLDataset:
        """The rows of `files`, checked against the tools and the scorers.

        Raises:
            ConfigError: no scorer is known for a row's data source.
            DataError: something is wrong with a file or row.
        """
        rows = RLDataset(files, chat=self.chat, tool_schemas=self.schemas, options=self.data, max_samples=max_samples)
        reward = self.roles.reward
        if reward.enable and reward.reward_manager == "naive" and self.roles.custom_reward.path is None:
            for source in sorted(rows.data_sources):
                scorer_of(source)
        return rows

    def validation_set(self) -> RLDataset | None:
        """The rows of `data.val_files`; None without any."""
        files = self.data.val_files
        return self.dataset(files, self.data.val_max_samples) if files else None


def prepare(config: DictConfig) -> RunSetup:
    """Checks the whole configuration and loads plugins, tools and tokenizer.

    Raises:
        ConfigError, DataError: one line that names the key or file.
    """
    load_plugins(config.plugins)
    part = config.actor_rollout_ref
    rollout = to_options(RolloutOptions, part.rollout, "actor_rollout_ref.rollout", ignore=("tool_config",))
    actor = to_options(ActorOptions, part.actor, "actor_rollout_ref.actor")
    algorithm = to_options(AlgorithmOptions, config.algorithm, "algorithm")
    trainer = to_options(TrainerOptions, config.trainer, "trainer")
    data = to_options(DataOptions, config.data, "data")
    apply_run_options(trainer)
    roles = RoleOptions(
        model=to_options(ModelOptions, part.model, "actor_rollout_ref.model"),
        actor=actor,
        ref=to_options(RefOptions, part.ref, "actor_rollout_ref.ref"),
        rollout=rollout,
        critic=to_options(CriticOptions, config.critic, "critic"),
        reward=to_options(RewardOptions, config.reward_model, "reward_model"),
        custom_reward=to_options(CustomRewardOptions, config.custom_reward_function, "custom_reward_function"),
        chat_template_kwargs=data.apply_chat_template_kwargs,
        needs_ref=actor.use_kl_loss or algorithm.use_kl_in_reward,
        deterministic=trainer.deterministic,
        device=resolve_device(trainer.device),
        config=config,
    )
    _check_together(rollout, algorithm, roles)
    if roles.model.path is None:
        raise ConfigError("actor_rollout_ref.model.path is not set: give the folder of a Hugging Face model")
    tools = collect_tools(rollout.multi_turn)
    tokenizer = load_tokenizer(roles.model.path, trust_remote_code=roles.model.trust_remote_code)
    chat = ChatTemplate(tokenizer, **dict(data.apply_chat_template_kwargs))
    return RunSetup(data, algorithm, trainer, roles, tools, tokenizer, chat, config)


def _check_together(rollout: RolloutOptions, algorithm: AlgorithmOptions, roles: RoleOptions) -> None:
    """Settings that are fine alone and wrong together."""
    restricted = rollout.top_p < 1 or rollout.top_k > 0
    if algorithm.rollout_correction.bypass_mode and restricted:
        raise ConfigError(
            "algorithm.rollout_correction.bypass_mode=true needs rollout.top_p=1 and top_k=-1: the engine's log-probs "
            "are those of the restricted distribution, the actor's are not"
        )
    if algorithm.adv_estimator == "grpo" and rollout.n < 2:
        raise ConfigError("algorithm.adv_estimator=grpo compares answers to one prompt: set rollout.n to 2 or more")
    if roles.custom_reward.path and not roles.reward.enable:
        raise ConfigError("custom_reward_function.path is set, but reward_model.enable=false never calls it")


def collect_tools(options: MultiTurnOptions) -> dict[str, BaseTool]:
    """All configured tools by name; none when `multi_turn.enable=false`.

    Raises:
        ConfigError: two sources define the same name, or one cannot be loaded.
    """
    tools: dict[str, BaseTool] = {}
    if not options.enable:
        return tools
    sources: list[tuple[str, Callable[[str], list[BaseTool]]]]
    sources = [(path, load_tools) for path in _paths(options.tool_config_path)]
    sources += [(path, load_function_tools) for path in _paths(options.function_tool_path)]
    for path, load in sources:
        for tool in load(path):
            if tool.name in tools:
                raise ConfigError(f"{path}: a tool named '{tool.name}' is already configured")
            tools[tool.name] = tool
    return tools


def _paths(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def apply_run_options(options: RunOptions) -> None:
    """Threads and determinism of this process."""
    import torch

    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    torch.manual_seed(options.seed)
    if options.deterministic and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def resolve_device(name: str) -> str:
    """`auto` as a GPU if there is one, else the CPU.

    Raises:
        ConfigError: the device does not exist here.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"trainer.device={name}: no GPU is visible to torch; use auto or cpu")
    return name


def plain_config(config: DictConfig) -> str:
    """The resolved configuration as YAML, for the run's folder."""
    return OmegaConf.to_yaml(config, resolve=True)
