"""`BaseTool`: the base class of all tools.

Invariant: one object serves all trajectories concurrently and keeps the state of each under the instance id passed to
`create`. `ToolSession` calls the four methods in the right order, and exactly once where promised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from etude.errors import ConfigError
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.trace import rollout_trace_op

State = TypeVar("State")
Execution = tuple[ToolResponse, float, dict[str, Any]]
"""What `execute` returns: (response, step reward, metrics)."""


def function_schema(name: str, description: str, required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    """Returns the OpenAI schema of a function; `properties` are the JSON Schemas of its arguments."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class BaseTool:
    """A tool: CREATE → EXECUTE (any number of times) → CALC_REWARD → RELEASE for each trajectory.

    A subclass overrides `execute`, and the other methods as needed; all four are `async def`. A `name` set in the class
    body is the tool's only name; without it, the schema names the tool.
    """

    name: str
    tool_schema: OpenAIFunctionToolSchema
    schema: ClassVar[dict[str, Any] | None] = None
    """The default schema, used where the configuration has none."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """Stores the tool's `config` and schema; a missing schema comes from `get_openai_tool_schema()`.

        Raises:
            ConfigError: there is no schema, or its name differs from the class's.
        """
        self.config = config
        self.tool_schema = tool_schema  # type: ignore[assignment]  # None only until set below
        schema = tool_schema or self.get_openai_tool_schema()
        kind = type(self).__name__
        if schema is None:
            raise ConfigError(f"{kind} has no schema: set tool_schema, or override get_openai_tool_schema()")
        declared = getattr(type(self), "name", None)
        if isinstance(declared, str) and declared != schema.function.name:
            raise ConfigError(f"{kind} is the tool '{declared}', but its schema says '{schema.function.name}'")
        self.tool_schema = schema
        if not isinstance(declared, str | property):
            self.name = schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Returns the schema that the prompt shows: the configured one, else the class's."""
        if self.tool_schema is None and self.schema is not None:
            return OpenAIFunctionToolSchema.model_validate(self.schema)
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> tuple[str, ToolResponse]:
        """Starts a trajectory; the row's `create_kwargs` are passed as keyword arguments.

        Returns the instance id and a response; unless it is empty, it is appended to the user's message.
        """
        return instance_id or str(uuid4()), ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> Execution:
        """Executes one tool call of the model; returns (response, step reward, metrics).

        Raises:
            ToolError: the call failed; the error's text is returned to the model.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define execute")

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float:
        """Returns the reward of the whole trajectory; called at most once, after the trajectory has ended."""
        return 0.0

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Frees what `create` allocated; called once, however the trajectory ended."""


class StatefulTool(BaseTool, Generic[State]):
    """Keeps one state per trajectory, which `begin` creates from the row's `create_kwargs`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, State] = {}

    async def begin(self, **create_kwargs: Any) -> State:
        """Returns the initial state of a trajectory."""
        raise NotImplementedError

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> tuple[str, ToolResponse]:
        """Starts a trajectory and stores its state."""
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = await self.begin(**create_kwargs)
        return instance_id, ToolResponse()

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Drops the trajectory's state."""
        self._instance_dict.pop(instance_id, None)
