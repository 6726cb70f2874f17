"""`AgentLoopBase`: base class of agent loops, which roll out one trajectory each, and the context that loops share.

A loop calls `server_manager.generate(request_id=…, prompt_ids=…, sampling_params=…)` on its `TrajectoryClient`. Each loop
object rolls out one trajectory, so it may keep state on `self`.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from etude.agents.client import TrajectoryClient
from etude.agents.images import read_row
from etude.agents.interactions import BaseInteraction
from etude.chat import ChatTemplate, ToolParser
from etude.chat.placeholders import image_count
from etude.environments import Environments
from etude.errors import ConfigError
from etude.inference import SamplingParams
from etude.models import ImageReader
from etude.options import MultiTurnOptions, RolloutOptions
from etude.registry import Registry, import_beside
from etude.schemas import ImageInput
from etude.tools import BaseTool
from etude.tools.config_file import read_data_file
from etude.trace import Tracer
from etude.trajectory import AgentLoopOutput, StopReason, Trajectory

AGENT_LOOPS: Registry[Callable[..., AgentLoopBase]] = Registry("agent loop")
register = AGENT_LOOPS.register


@dataclass(frozen=True)
class AgentContext:
    """Everything that the trajectories of one worker share, loaded once, before any model.

    `config` is the whole resolved configuration, for users' loops; `processor` (Hugging Face's) and `images` are None for a
    text-only model; `reward_model` is the judge of an environment. `scored`: whether a reward manager scores the
    rollouts, so that they need no other reward.
    """

    config: Any
    options: RolloutOptions
    tokenizer: Any
    chat: ChatTemplate
    parser: ToolParser
    tools: Mapping[str, BaseTool] = field(default_factory=dict)
    interactions: Mapping[str, BaseInteraction] = field(default_factory=dict)
    environment: Environments | None = None
    tracer: Tracer | None = None
    processor: Any = None
    images: ImageReader | None = None
    reward_model: Any = None
    scored: bool = True

    def with_stops(self, sampling: SamplingParams, parser: ToolParser) -> SamplingParams:
        """Adds the tool-call format's stop ids to `sampling`, and its stop strings if none are set there or in
        `rollout.stop`."""
        ids = tuple(dict.fromkeys([*sampling.stop_token_ids, *parser.stop_token_ids]))
        texts = sampling.stop if sampling.stop or self.options.stop is not None else tuple(parser.stop_strings)
        return replace(sampling, stop_token_ids=ids, stop=texts)


class AgentLoopBase(ABC):
    """Base class of agent loops; one object per trajectory.

    A row's `agent_name` selects a subclass registered with `@register("name")`. A subclass with its own `__init__` must
    forward the arguments: `super().__init__(trainer_config, **kwargs)`.

    Attributes:
        context: shared by all loops of the worker; `context.options` is the rollout section.
        config: the whole configuration, with keys as in YAML: `config.actor_rollout_ref.rollout.multi_turn.format`;
            `rollout_config` and `data_config` are shortcuts to its sections.
        server_manager: samples tokens.
        tokenizer, chat: `chat.context_ids(messages, after=sampled_ids)` encodes messages after an assistant turn;
            `render_prompt(row)` the prompt, which shows the model the row's tools. Neither re-encodes sampled ids.
        processor: the Hugging Face processor of a vision model, else None.
        tools: the configured tools by name, unless the class has its own `tools`.
    """

    tools: Mapping[str, BaseTool]
    _class_initialized = False  # verl's loops set this in `init_class`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls.run).parameters.values()):
            raise ConfigError(
                f"agent loop {cls.__qualname__}: declare  async def run(self, sampling_params, **row): the row's columns "
                "arrive by name, its messages as row['raw_prompt']"
            )

    def __init__(
        self,
        trainer_config: AgentContext,
        server_manager: TrajectoryClient,
        tokenizer: Any,
        processor: Any = None,
        **keywords: Any,
    ) -> None:
        self.context = trainer_config
        self.config = trainer_config.config
        self.init_class(config=self.config, tokenizer=tokenizer, processor=processor, **keywords)
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.chat = trainer_config.chat
        self._default(tools=trainer_config.tools)

    @classmethod  # noqa: B027  (overriding it is optional)
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **keywords: Any) -> None:
        """Called before each object is created, as in verl; a subclass may load what it needs once into class attributes.

        `keywords` come from the loop's entry in `agent_loop_config_path`.
        """

    def _default(self, **values: Any) -> None:
        """Sets attributes that the class, or its `init_class`, has not set."""
        for name, value in values.items():
            if not hasattr(type(self), name):
                setattr(self, name, value)

    @cached_property
    def rollout_config(self) -> Any:
        """`config.actor_rollout_ref.rollout`."""
        return self.config.actor_rollout_ref.rollout

    @cached_property
    def data_config(self) -> Any:
        """`config.data`."""
        return self.config.data

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        images: Sequence[ImageInput] | None = None,
        videos: Sequence[Any] | None = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Returns the ids of a prompt; with `remove_system_prompt`, of tool and user messages after a complete assistant
        turn. verl's name for `chat.initial_ids` and `chat.context_ids`.

        Raises:
            ConfigError: `videos` is not empty.
        """
        if videos:
            raise ConfigError("apply_chat_template() takes no videos: models are shown images only")
        tokens = [image.tokens for image in images or ()]
        if remove_system_prompt:
            return [token for ids, _ in self.chat.context_ids(messages, image_tokens=tokens) for token in ids]
        return self.chat.initial_ids(messages, tools, tokens)

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns an empty dict; exists because verl's loops call it first.

        Raises:
            ConfigError: a message has an image: use `read_images` instead.
        """
        if any(map(image_count, messages)):
            raise ConfigError(
                f"agent loop {type(self).__name__}: take the row's images from  await self.read_images(row)"
            )
        return {}

    process_multi_modal_info = process_vision_info

    async def read_images(self, row: Mapping[str, Any]) -> list[ImageInput]:
        """Reads the images of the row's `raw_prompt`. Pass their `tokens` to `chat.initial_ids`, and all images of the
        context to every `generate(images=…)` and to the `Trajectory` or `AgentLoopOutput`.

        Raises:
            DataError: an image cannot be decoded; names the row.
        """
        reader = self.context.images
        if reader is None or not any(map(image_count, row["raw_prompt"])):
            return []
        return await read_row(reader, row.get("images") or (), f"row {row['request_id']}")

    def render_prompt(
        self,
        row: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        images: Sequence[ImageInput] = (),
    ) -> list[int]:
        """Returns the ids of a prompt: by default the row's messages, with the tools that the row may use; `tools=[]` shows
        none. Dataset rows carry the ids in `raw_prompt_ids`, rendered once for all samples; these are reused if messages,
        tools and template are the same and there are no images."""
        messages = row["raw_prompt"] if messages is None else messages
        if tools is None:
            active = row.get("active_tools", list(self.tools))
            tools = [self.tools[name].get_openai_tool_schema().to_openai() for name in active if name in self.tools]
        names, known = [tool["function"]["name"] for tool in tools or ()], row.get("raw_prompt_ids")
        same = known is not None and not images and names == row.get("active_tools") and messages == row["raw_prompt"]
        if same and self.chat is self.context.chat and self.tools is self.context.tools:
            return list(known or ())
        return self.chat.initial_ids(messages, tools or None, [image.tokens for image in images])

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop, for `run_in_executor`."""
        return asyncio.get_running_loop()

    def room(self, trajectory: Trajectory) -> int:
        """Number of tokens left for the response, within `data.max_response_length` and `rollout.max_model_len`."""
        return response_room(self.context.options, len(trajectory.prompt_ids), trajectory.response_length)[0]

    def turn_budget(self, trajectory: Trajectory) -> tuple[int, StopReason]:
        """Maximum tokens of the next turn, and the trajectory's stop reason if the turn uses them up."""
        room = response_room(self.context.options, len(trajectory.prompt_ids), trajectory.response_length)
        return tightest_budget(room, self.server_manager.num_sampled, self.context.options.multi_turn)

    def prompt_fits(self, trajectory: Trajectory) -> bool:
        """Whether the prompt is within `data.max_prompt_length` and leaves room for at least one token."""
        return len(trajectory.prompt_ids) <= self.context.options.prompt_length and self.room(trajectory) >= 1

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory | AgentLoopOutput | list[Any]:
        """Rolls out one trajectory.

        Args:
            sampling_params: `temperature`, `top_p`, `top_k`, `max_tokens`, `stop_token_ids`, `stop`, `seed`.
            row: the dataset row (`raw_prompt`, `tools_kwargs`, `extra_info` …), `request_id`, `attempt`, which is 0 unless
                this is a retry after an infrastructure failure, and `group_seed`, for randomness that all rollouts of a
                prompt share.

        Returns:
            The trajectory, or an `AgentLoopOutput` with the response's ids and mask. Log-probs may be omitted; if given,
            they must be the engine's. A `reward_score` counts if `reward_model.enable=false`; otherwise the reward
            manager's score replaces it. A loop that rewrites its history, so that no single context holds everything
            sampled, returns a list of these in time order; only the last one, the main sequence, carries rewards, messages
            and stop reason.

        Raises:
            InfrastructureError: infrastructure failed; the trajectory is retried from fresh state.
        """


def response_room(options: RolloutOptions, prompt: int, response: int) -> tuple[int, StopReason]:
    """Returns the tokens left after a prompt and a response of these lengths, and the stop reason once they are used up."""
    budgets = [(options.response_length - response, StopReason.RESPONSE_LENGTH)]
    if options.max_model_len is not None:
        budgets.append((options.max_model_len - prompt - response, StopReason.CONTEXT_LENGTH))
    return min(budgets, key=itemgetter(0))


def tightest_budget(room: tuple[int, StopReason], sampled: int, limits: MultiTurnOptions) -> tuple[int, StopReason]:
    """Returns the tightest budget of the next turn: `room`, or a limit on sampled tokens per trajectory, of which `sampled`
    are used, or per turn."""
    budgets = [room]
    if limits.max_trajectory_tokens is not None:
        budgets.append((limits.max_trajectory_tokens - sampled, StopReason.TRAJECTORY_LENGTH))
    if limits.max_turn_tokens is not None:
        budgets.append((limits.max_turn_tokens, StopReason.TURN_LENGTH))
    return min(budgets, key=itemgetter(0))


@dataclass(frozen=True)
class ConfiguredLoop:
    """A loop class with its keyword arguments from the configuration file."""

    loop_class: type[AgentLoopBase]
    keywords: Mapping[str, Any]

    def __call__(self, **given: Any) -> AgentLoopBase:
        """Creates a loop for one trajectory."""
        return self.loop_class(**self.keywords, **given)


def register_agent_loops(path: str | Path) -> list[str]:
    """Registers the loops in the file given by `rollout.agent.agent_loop_config_path`, and returns their names.

        - name: my_agent
          _target_: package.module.MyAgentLoop     # or path/to/file.py:MyAgentLoop
          max_steps: 5                             # other keys are passed to the class

    Reading a file a second time has no effect.

    Raises:
        ConfigError: the file is missing or malformed, a class is missing or not an agent loop, or a name is taken.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(f"agent loop configuration not found: {path}")
    entries = read_data_file(path)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a list of entries with 'name' and '_target_'")
    names = []
    for number, entry in enumerate(entries):
        where = f"{path}: entry {number}"
        if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in ("name", "_target_")):
            raise ConfigError(f"{where}: expected a mapping with 'name' and '_target_' (texts)")
        try:
            found = import_beside(entry["_target_"], path)
            if not (isinstance(found, type) and issubclass(found, AgentLoopBase)):
                raise ConfigError(f"'{entry['_target_']}' is no subclass of etude.agents.AgentLoopBase")
            keywords = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
            loop, name = ConfiguredLoop(found, keywords), entry["name"]
            held = AGENT_LOOPS.get(name) if name in AGENT_LOOPS else None
            if held != loop and (held is not found or keywords):  # else read before, or registered by its own module
                AGENT_LOOPS.register(name)(loop)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        names.append(name)
    return names
