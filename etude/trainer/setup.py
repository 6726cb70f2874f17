"""From a resolved configuration to the parts of a run, everything checked before a model is loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from etude.agents import AGENT_LOOPS, AgentParts, MultiTurnOptions, RolloutOptions, ToolAgentLoop
from etude.agents.environments import EnvOptions, load_environment
from etude.agents.gateway import check_openai_agent
from etude.agents.interactions import load_interactions
from etude.agents.loops import register_agent_loops
from etude.chat import ChatTemplate, ToolParser
from etude.chat.check import require_answers
from etude.chat.parsers.trial import unread_call
from etude.config import to_options
from etude.data import DataOptions, RLDataset
from etude.errors import ConfigError
from etude.inference import check_takes_images
from etude.registry import load_plugins
from etude.rewards.default import scorer_of
from etude.tools import BaseTool, ToolCalls, load_function_tools, load_tools
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
from etude.workers.reading import Reading, load_reading

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSetup:
    """The checked options of a run, its tools, tokenizer and chat template."""

    data: DataOptions
    algorithm: AlgorithmOptions
    trainer: TrainerOptions
    roles: RoleOptions
    parts: AgentParts
    reading: Reading
    config: DictConfig

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.reading.tokenizer

    @property
    def chat(self) -> ChatTemplate:
        """The model's chat template."""
        return self.reading.chat

    @property
    def schemas(self) -> dict[str, dict[str, Any]] | None:
        """The configured tools' schemas by name; None when `multi_turn.enable=false`."""
        if not self.roles.rollout.multi_turn.enable:
            return None
        return {name: tool.get_openai_tool_schema().to_openai() for name, tool in self.parts.tools.items()}

    def dataset(self, files: Sequence[str], max_samples: int = -1) -> RLDataset:
        """The rows of `files`, checked against the tools and the scorers.

        Raises:
            ConfigError: no scorer is known for a row's data source.
            DataError: something is wrong with a file or row.
        """
        rows = RLDataset(
            files,
            chat=self.chat,
            tool_schemas=self.schemas,
            interactions=list(self.parts.interactions),
            agent_loops=AGENT_LOOPS.names(),
            options=self.data,
            images=self.reading.images,
            max_samples=max_samples,
        )
        reward = self.roles.reward
        if reward.enable and reward.reward_manager in ("naive", "dapo") and self.roles.custom_reward.path is None:
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
    rollout = to_options(RolloutOptions, part.rollout, "actor_rollout_ref.rollout", ignore=("tool_config", "max_turns"))
    actor = to_options(ActorOptions, part.actor, "actor_rollout_ref.actor")
    algorithm = to_options(AlgorithmOptions, config.algorithm, "algorithm")
    trainer = to_options(TrainerOptions, config.trainer, "trainer")
    data = to_options(DataOptions, config.data, "data")
    env = to_options(EnvOptions, part.env, "actor_rollout_ref.env")
    apply_run_options(trainer)
    if rollout.agent.agent_loop_config_path is not None:
        register_agent_loops(rollout.agent.agent_loop_config_path)
    if rollout.agent.default_agent_loop is not None:
        AGENT_LOOPS.get(rollout.agent.default_agent_loop)
    check_openai_agent(rollout.agent.openai_agent)
    roles = role_options(
        trainer,
        config,
        model=to_options(ModelOptions, part.model, "actor_rollout_ref.model"),
        actor=actor,
        ref=to_options(RefOptions, part.ref, "actor_rollout_ref.ref"),
        rollout=rollout,
        critic=to_options(CriticOptions, config.critic, "critic"),
        reward=_reward_options(config, env),
        custom_reward=to_options(CustomRewardOptions, config.custom_reward_function, "custom_reward_function"),
        chat_template_kwargs=data.apply_chat_template_kwargs,
        needs_ref=actor.use_kl_loss or algorithm.use_kl_in_reward,
    )
    _check_together(rollout, algorithm, roles, env)
    if roles.model.path is None:
        raise ConfigError("actor_rollout_ref.model.path is not set: give the folder of a Hugging Face model")
    parts = collect_parts(rollout, env)
    reading = load_reading(roles.model, data.apply_chat_template_kwargs)
    if reading.processor is not None:
        check_takes_images(rollout.name)
    _check_answers(rollout, parts, reading, data.apply_chat_template_kwargs)
    return RunSetup(data, algorithm, trainer, roles, parts, reading, config)


def _check_together(rollout: RolloutOptions, algorithm: AlgorithmOptions, roles: RoleOptions, env: EnvOptions) -> None:
    """Settings that are fine alone and wrong together."""
    restricted = rollout.top_p < 1 or rollout.top_k > 0
    if algorithm.rollout_correction.bypass_mode and restricted:
        raise ConfigError(
            "algorithm.rollout_correction.bypass_mode=true needs rollout.top_p=1 and top_k=-1: the engine's log-probs "
            "are those of the restricted distribution, the actor's are not"
        )
    if roles.deterministic and rollout.multi_turn.max_seconds is not None:
        raise ConfigError(
            "rollout.multi_turn.max_seconds ends trajectories by the clock: trainer.deterministic forbids it"
        )
    if roles.deterministic and rollout.mode == "sync" and env.chosen:
        raise ConfigError(
            "rollout.mode=sync steps environments together, for which trajectories wait for each other; "
            "trainer.deterministic does not go with that: set rollout.mode=async"
        )
    val = rollout.val_kwargs
    if val.n > 1 and not (val.do_sample and val.temperature > 0):
        raise ConfigError(
            f"actor_rollout_ref.rollout.val_kwargs.n={val.n} without sampling gives equal answers: set val_kwargs.n=1, or "
            "val_kwargs.do_sample=true and a val_kwargs.temperature above 0"
        )
    if algorithm.adv_estimator == "grpo" and rollout.n < 2:
        raise ConfigError("algorithm.adv_estimator=grpo compares answers to one prompt: set rollout.n to 2 or more")
    if roles.custom_reward.path and not roles.reward.enable:
        raise ConfigError("custom_reward_function.path is set, but reward_model.enable=false never calls it")


def _check_answers(
    rollout: RolloutOptions, parts: AgentParts, reading: Reading, template_kwargs: Mapping[str, Any]
) -> None:
    """The chat template writes what the configured tools will answer.

    What a user or a text environment says, every template that is accepted does. An agent loop of the user's own may show
    tools' answers in its own way.
    """
    loop = AGENT_LOOPS.get(rollout.agent.default_agent_loop or "tool_agent")
    if not parts.tools or not (isinstance(loop, type) and issubclass(loop, ToolAgentLoop)):
        return
    parser = ToolParser.get_tool_parser(rollout.multi_turn.format, reading.tokenizer)
    try:
        require_answers(reading.chat, "tool" if parser.result_tag is None else "user")
    except ConfigError as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.multi_turn: tools are configured, but {error}; take a model whose template can, put "
            "a chat_template.jinja that can beside its tokenizer, or set multi_turn.format=search_r1, which needs none"
        ) from error
    if parser.result_tag is None and parts.environment is None:
        _warn_of_unread_calls(rollout.multi_turn.format, parser, reading, template_kwargs)


def _warn_of_unread_calls(name: str, parser: ToolParser, reading: Reading, template_kwargs: Mapping[str, Any]) -> None:
    """A model that writes its calls as its template does, under another format, would be told of no call and rewarded for
    none; prompts may teach it that format, so that this is no error. Whoever wrote a parser of their own means it."""
    ours = type(parser).__module__.startswith("etude.")
    unread = unread_call(parser, reading.tokenizer, **template_kwargs) if ours else None
    if unread is not None:
        logger.warning(
            "actor_rollout_ref.rollout.multi_turn.format=%s does not read the call that the chat template writes (%r): the "
            "model's calls are missed unless its prompts teach it that format; multi_turn.format=auto takes the template's",
            name,
            unread,
        )


def _reward_options(config: DictConfig, env: EnvOptions) -> RewardOptions:
    """`reward_model`, where RL-Factory's reward manager `parallel` stands for the score that the environment gives."""
    options = to_options(RewardOptions, config.reward_model, "reward_model")
    if options.reward_manager != "parallel":
        return options
    if not env.chosen:
        raise ConfigError(
            "reward_model.reward_manager=parallel is the environment's score: set actor_rollout_ref.env.name"
        )
    return replace(options, enable=False, reward_manager="naive")


def collect_parts(rollout: RolloutOptions, env: EnvOptions) -> AgentParts:
    """What agents talk to: the configured tools, interactions and environment.

    Raises:
        ConfigError: one of them cannot be loaded.
    """
    options = rollout.multi_turn
    tools = collect_tools(options)
    if not options.enable:
        return AgentParts()
    users = options.interaction_config_path
    environment = load_environment(env, tools, lockstep=rollout.mode == "sync")
    return AgentParts(
        tools if environment is None else {**tools, **environment.tools},
        load_interactions(users) if users else {},
        environment,
    )


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
            ToolCalls.of(tool)  # its limits, schema and recordings make sense
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


def role_options(run: RunOptions, config: DictConfig, **sections: Any) -> RoleOptions:
    """The options of the roles: what every kind of run sets alike, and the sections that this one has."""
    return RoleOptions(**sections, deterministic=run.deterministic, device=resolve_device(run.device), config=config)


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
