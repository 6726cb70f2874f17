"""From a resolved configuration to the parts of a run, everything checked before a model is loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from etude.agents import AGENT_LOOPS, AgentParts, ToolAgentLoop
from etude.agents.environments import load_environment
from etude.agents.gateway import check_openai_agent
from etude.agents.interactions import load_interactions
from etude.agents.loops import register_agent_loops
from etude.algorithms import ADVANTAGE_ESTIMATORS, Estimator
from etude.chat import ChatTemplate, ToolParser
from etude.chat.check import require_answers
from etude.chat.parsers.trial import unread_call
from etude.config.checks import load_user_records
from etude.config.names import check_names
from etude.data import RLDataset
from etude.errors import ConfigError
from etude.inference import check_takes_images
from etude.model_folder import local_folder, longest_context, read_config
from etude.options import (
    AlgorithmOptions,
    DataOptions,
    EnvOptions,
    MultiTurnOptions,
    RewardOptions,
    RolloutOptions,
    RunOptions,
    TrainerOptions,
    TrainOptions,
)
from etude.options.validate import to_options
from etude.rewards.default import scorer_of
from etude.tools import BaseTool, ToolCalls, load_function_tools, load_tools
from etude.workers.options import RoleOptions
from etude.workers.reading import Reading, load_reading
from etude.workers.reward import build_scorer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSetup:
    """The checked options of a run, its tools, tokenizer and chat template. `needs` are the columns that estimator, loss and
    KL terms need beside what a rollout has."""

    data: DataOptions
    algorithm: AlgorithmOptions
    needs: frozenset[str]
    trainer: TrainerOptions
    roles: RoleOptions
    parts: AgentParts
    reading: Reading
    config: DictConfig

    @property
    def estimator(self) -> Estimator:
        """The advantage estimator's record."""
        return ADVANTAGE_ESTIMATORS.get(self.algorithm.adv_estimator)

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

    @property
    def longest_sequence(self) -> int | None:
        """Most tokens of prompt and response together; None where only their own limits count."""
        folder = local_folder(str(self.roles.model.path))
        return self.roles.rollout.max_model_len or (longest_context(read_config(folder)) if folder else None)

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
    options = to_options(TrainOptions, plain_config(config))
    for line in load_user_records(options):
        logger.warning("%s", line)
    policy, data = options.actor_rollout_ref, options.data
    rollout = policy.rollout
    if rollout.agent.agent_loop_config_path is not None:
        register_agent_loops(rollout.agent.agent_loop_config_path)
    check_names(options)
    apply_run_options(options.trainer)
    check_openai_agent(rollout.agent.openai_agent)
    roles = role_options(
        options.trainer,
        config,
        model=policy.model,
        actor=policy.actor,
        ref=policy.ref,
        rollout=rollout,
        critic=options.critic,
        reward=_reward_options(options.reward_model),
        custom_reward=options.custom_reward_function,
        chat_template_kwargs=data.apply_chat_template_kwargs,
        needs_ref="ref_log_prob" in options.needs,
    )
    if roles.model.path is None:
        raise ConfigError("actor_rollout_ref.model.path is not set: give the folder of a Hugging Face model")
    parts = collect_parts(rollout, policy.env)
    reading = load_reading(roles.model, data.apply_chat_template_kwargs)
    if reading.processor is not None:
        check_takes_images(rollout.name)
    _check_answers(rollout, parts, reading, data.apply_chat_template_kwargs)
    build_scorer(roles, reading.tokenizer)  # a reward that cannot be loaded is told before a model is
    return RunSetup(data, options.algorithm, options.needs, options.trainer, roles, parts, reading, config)


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


def _reward_options(options: RewardOptions) -> RewardOptions:
    """`reward_model`, where RL-Factory's reward manager `parallel` stands for the score that the environment gives."""
    is_environments = options.reward_manager == "parallel"
    return replace(options, enable=False, reward_manager="naive") if is_environments else options


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
    sources = [(path, load_tools) for path in options.tool_config_path or ()]
    sources += [(path, load_function_tools) for path in options.function_tool_path or ()]
    for path, load in sources:
        for tool in load(path):
            if tool.name in tools:
                raise ConfigError(f"{path}: a tool named '{tool.name}' is already configured")
            ToolCalls.of(tool)  # its limits, schema and recordings make sense
            tools[tool.name] = tool
    return tools


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


def plain_config(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain containers, its interpolations filled in."""
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(name): value for name, value in container.items()}
