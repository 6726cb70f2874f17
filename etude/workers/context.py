"""The tools, interactions and environment of a rollout worker, loaded once by the worker itself.

Invariant: the driver gets only a `ToolCatalogue`: plain values with which rows and prompts are checked before any model is
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from etude.agents import AGENT_LOOPS, AgentContext, ToolAgentLoop
from etude.agents.environments import load_environment
from etude.agents.gateway import check_openai_agent
from etude.agents.interactions import load_interactions
from etude.chat import ToolParser
from etude.environments.loader import load_environments
from etude.errors import ConfigError, raise_faults
from etude.options import MultiTurnOptions, TrainOptions
from etude.tools import BaseTool, ToolRuntime, load_function_tools, load_tools
from etude.tools.contract import overrides
from etude.trace import Tracer
from etude.workers.role import user_config
from etude.workers.tokenizer_bundle import TokenizerBundle


@dataclass(frozen=True)
class ToolCatalogue:
    """The OpenAI schemas of the configured tools by name, and the names of interactions, registered agent loops and
    environments. `acting_tools`: whether an environment has tools of its own.

    `judging_tools`: the tools that override `calc_reward`. `tool_messages`: whether the default agent loop renders tool
    responses with the chat template; a user's loop or an environment may not. `addresses`: (configuration key, http address)
    of the services that tools use.
    """

    schemas: Mapping[str, dict[str, Any]]
    interactions: tuple[str, ...]
    agent_loops: tuple[str, ...]
    environments: tuple[str, ...]
    acting_tools: bool
    judging_tools: tuple[str, ...]
    has_environment: bool
    tool_messages: bool
    addresses: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, context: AgentContext) -> ToolCatalogue:
        """The catalogue of what a worker has loaded."""
        loop = AGENT_LOOPS.get(context.options.agent.default_agent_loop or "tool_agent")
        return cls(
            {name: tool.get_openai_tool_schema().to_openai() for name, tool in context.tools.items()},
            tuple(context.interactions),
            tuple(AGENT_LOOPS.names()),
            tuple(context.environment.entries) if context.environment else (),
            bool(context.environment and any(each.tools for each in context.environment.entries.values())),
            tuple(name for name, tool in context.tools.items() if overrides(tool, "calc_reward")),
            context.environment is not None,
            isinstance(loop, type) and issubclass(loop, ToolAgentLoop),
            tuple(each for name, tool in context.tools.items() for each in addresses_in(tool.config or {}, name)),
        )


def addresses_in(values: object, place: str = "") -> Iterator[tuple[str, str]]:
    """Yields (key path, http address) for each address in a nested configuration; a path is like `tool.config.url`."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from addresses_in(value, f"{place}.{name}" if place else str(name))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from addresses_in(value, place)
    elif isinstance(values, str) and values.startswith(("http://", "https://")):
        yield place, values


def load_context(options: TrainOptions, bundle: TokenizerBundle, ranks: int = 1) -> AgentContext:
    """Loads the configured tools, interactions and environment, and everything else that the trajectories of a worker, one
    of `ranks`, share.

    Raises:
        ConfigError: one of them cannot be loaded.
    """
    rollout = options.rollout
    multi_turn = rollout.multi_turn
    check_openai_agent(rollout.agent.openai_agent)
    tools: Mapping[str, BaseTool] = collect_tools(multi_turn)
    users = multi_turn.interaction_config_path if multi_turn.enable else None
    environment = None
    if multi_turn.enable:
        environment = load_environment(options.actor_rollout_ref.env, tools, lockstep=rollout.mode == "sync")
        environment = environment or load_environments(options.environments)
    if environment is not None and options.trainer.deterministic:
        # The engine waits for every trajectory that has begun: none may wait for a place, which another rank may hold.
        shares = (max(1, limit // ranks) for limit in environment.limits)
        lanes = min([rollout.max_concurrent_trajectories, *shares])
        rollout = replace(rollout, max_concurrent_trajectories=lanes)
    return AgentContext(
        config=user_config(options),
        options=rollout,
        tokenizer=bundle.tokenizer,
        chat=bundle.chat,
        parser=ToolParser.get_tool_parser(multi_turn.format, bundle.tokenizer),
        tools=tools if environment is None else {**tools, **environment.tools},
        interactions=load_interactions(users) if users else {},
        environment=environment,
        tracer=Tracer.of(rollout.trace, options.trainer.project_name, options.trainer.experiment_name),
        processor=bundle.processor,
        images=bundle.images,
        scored=options.scores,
    )


def collect_tools(options: MultiTurnOptions) -> dict[str, BaseTool]:
    """Loads all configured tools, by name; none if `multi_turn.enable=false`.

    Raises:
        ConfigError: two sources define the same name, or one cannot be loaded.
    """
    tools: dict[str, BaseTool] = {}
    if not options.enable:
        return tools
    sources: list[tuple[str, Callable[[str], list[BaseTool]]]]
    sources = [(path, load_tools) for path in options.tool_config_path or ()]
    sources += [(path, load_function_tools) for path in options.function_tool_path or ()]
    faults: list[ConfigError] = []
    for path, load in sources:
        try:
            for tool in load(path):
                if tool.name in tools:
                    raise ConfigError(f"{path}: a tool named '{tool.name}' is already configured")
                ToolRuntime.of(tool)  # rejects invalid limits, schemas or recordings
                tools[tool.name] = tool
        except ConfigError as error:
            faults.append(error)
    raise_faults(faults)
    return tools
