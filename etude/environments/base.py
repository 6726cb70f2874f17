"""`Environment`: what a model acts in, one object per session, and what its methods return.

    @environment("counter")
    class Counter(Environment):
        def reset(self, task, seed):
            self.number, self.goal = 0, task["goal"]
            return f"Count to {self.goal}."

        @tool
        def add(self, k: int) -> str:
            "Adds k to the number."
            self.number += k
            return str(self.number)

        def score(self):
            return float(self.number == self.goal)

Invariant (kept by `EnvironmentSession`): `reset` once, then any number of `step` and of tool calls, one at a time, then
`score` at most once and `close` exactly once, however the session ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from etude.errors import InfrastructureError, ToolError
from etude.registry import Registry
from etude.tools.base import BaseTool, function_schema
from etude.tools.function_tool import FunctionSignature, read_schema

Messages: TypeAlias = Sequence[Mapping[str, Any]]
F = TypeVar("F", bound=Callable[..., Any])

ENVIRONMENTS: Registry[Any] = Registry("environment")
environment = ENVIRONMENTS.register


class InvalidAction(ToolError):
    """The model acted against the rules: it is told the text and, if there is a `reward`, the turn earns it. The episode
    goes on."""

    def __init__(self, text: str, reward: float | None = None) -> None:
        super().__init__(text)
        self.reward = reward


class EnvironmentFull(InfrastructureError):
    """Raised by `reset` of an environment behind a server that has no session to give: the session waits, and asks again."""


@dataclass(frozen=True)
class Step:
    """What an action led to.

    Attributes:
        observation: what the model sees next: text, which becomes a user message, or messages of users, tools or the system.
        reward: of the turn; None: it has none.
        done: whether the episode is over; the observation is then not shown.
        tools: of `reset` only: the tools that the model has in this episode, as names (of the environment's methods, or of
            tools that the run configures) or OpenAI schemas (calls go to `call_tool`). None: all of them.
        metrics: numbers by name; the last of each name is averaged over episodes.
    """

    observation: str | Messages = ""
    reward: float | None = None
    done: bool = False
    tools: Sequence[str | Mapping[str, Any]] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Environment:
    """Base class of environments. Methods are plain functions, which run in a thread, or async ones.

    Attributes:
        limit: most sessions at once, in the whole run; None: as many as there are trajectories.
        thread: `shared`: a call runs in any thread of a pool. `own`: all calls of a session run in one thread of its own,
            for what must not change its thread (sqlite3, Playwright).
        reads_calls: whether tool calls stand in the text of `step`, instead of being run. None: if there are no tools.
        version: belongs to what a resumed run must find unchanged.
        cut_reward: what the last turn earns, besides what it earned, if a token limit ends the episode; None: nothing.
        row, conversation: the row, and the agent loop's state (messages, trajectory, tool session; None during `reset`),
            for those that need more than a task and the text of a turn.
    """

    limit: ClassVar[int | None] = None
    thread: ClassVar[Literal["shared", "own"]] = "shared"
    reads_calls: ClassVar[bool | None] = None
    version: ClassVar[str] = ""
    times_itself: ClassVar[bool] = False  # an adapter whose async calls, and what they call, have limits of their own
    must_reward: ClassVar[bool] = True  # False: another part of the run may score
    names: ClassVar[Mapping[str, str]] = {}  # an adapter's: method → what the user calls it, for errors
    cut_reward: float | None = None
    row: Mapping[str, Any] = {}
    conversation: Any = None

    def tasks(self, split: str) -> Iterable[Mapping[str, Any]] | None:
        """The tasks of `split`, `train` or `val`, as JSON objects; called on an object made for this alone. None: each seed
        is a task."""
        return None

    def reset(self, task: Mapping[str, Any], seed: int) -> Any:
        """Starts an episode.

        Args:
            task: one of `tasks`; of a row in a file, its `extra_info.task`, or else its `extra_info`.
            seed: the same for all rollouts of a prompt and for their retries; in [0, 2^31).

        Returns:
            The first observation: text, messages or a `Step`. Text is appended to the prompt's last user message.

        Raises:
            InfrastructureError: the trajectory is retried from fresh state.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define reset")

    def step(self, text: str) -> Any:
        """Acts with a turn of the model that calls no tool; without tools, with every turn as the model wrote it.

        Returns text, messages or a `Step`. The base class ends the episode.

        Raises:
            InvalidAction: the model is told.
            InfrastructureError: the trajectory is retried from fresh state. Any other exception stops the run.
        """
        return Step(done=True)

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Answers a call of a tool that `reset` gave as a schema; see `tool` for what it returns."""
        raise NotImplementedError(f"{type(self).__name__} does not define call_tool")

    async def drive(self, base_url: str, api_key: str) -> Any:
        """Defined by a class that drives itself: plays the whole episode, as a client of OpenAI's or Anthropic's interface
        at `base_url`, and returns what `score` would. Its steps are not called; the limit of its time is the rollout's."""
        raise NotImplementedError(f"{type(self).__name__} does not define drive")

    def score(self) -> Any:
        """Returns the reward of the whole episode: a number, or a dict with `score` and what is reported beside it. Called
        at every ending, also if a limit cut the episode. None: the rewards of its steps are all it earns."""
        return None

    def close(self) -> Any:
        """Releases the session's resources; called once, also after a `reset` that raised."""


def tool(function: F) -> F:
    """Marks a method of an `Environment` as a tool: name, hints and docstring become its schema, as for `function_tool`.

    The method returns text, a dict (shown as JSON), a `ToolResponse`, a tuple of one of these with a reward and metrics, or
    a `Step`. It raises `ToolError` or `InvalidAction` to tell the model.
    """
    function._etude_tool = True  # type: ignore[attr-defined]
    return function


def tool_methods(cls: type) -> list[str]:
    """The names of the methods of `cls` that are tools, those of its bases first."""
    found = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    return [name for name, value in found.items() if getattr(value, "_etude_tool", False)]


class EnvironmentTool(BaseTool):
    """A tool of an environment: its calls go to the trajectory's session. One object serves all sessions."""

    def __init__(self, schema: Any, timeout: float, signature: FunctionSignature | None = None) -> None:
        made = read_schema(schema, "environment")
        super().__init__({"timeout": timeout, "max_retries": 0, "on_exception": "stop"}, made)
        self._signature = signature

    @classmethod
    def of_method(cls, owner: type, name: str, timeout: float) -> EnvironmentTool:
        """The tool of a marked method.

        Raises:
            ConfigError: no schema can be derived from it; names method and parameter.
        """
        signature = FunctionSignature(functools.partial(getattr(owner, name), self=None), inferred=True)
        schema = function_schema(name, signature.description)
        schema["function"]["parameters"] = signature.parameters_schema()
        return cls(schema, timeout, signature)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], agent_data: Any = None, **execute_kwargs: Any
    ) -> Any:
        """Calls the method of the session's environment.

        Raises:
            ToolError: an argument has the wrong type, or the method raised one.
        """
        arguments = {**parameters, **execute_kwargs}
        if self._signature is not None:
            arguments = self._signature.bind(arguments)
        return await agent_data.environment.call_tool(self.name, arguments)
