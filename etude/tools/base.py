"""`BaseTool`: the base class of the documents' tools.

Invariant: one object serves all trajectories concurrently; the state of each is kept under the instance id
passed to `create`. Calling the four methods in the right order, and exactly once where promised, is left to
`ToolSession`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from etude.errors import ConfigError
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.trace import rollout_trace_op

State = TypeVar("State")


def function_schema(name: str, description: str, required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    """The OpenAI schema of a function; `properties` are the JSON Schemas of its arguments."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class BaseTool:
    """A tool: CREATE → EXECUTE (any number of times) → CALC_REWARD → RELEASE for each trajectory.

    A subclass overrides `execute`, and the others as it needs; all four are `async def`. A `name` set in
    the class body is the tool's only name; without it, the schema names the tool.
    """

    name: str
    tool_schema: OpenAIFunctionToolSchema
    schema: ClassVar[dict[str, Any] | None] = None
    """The tool's own schema, used where the configuration has none."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """Keeps the tool's `config` and schema; without a schema, the one of `get_openai_tool_schema()`.

        Raises:
            ConfigError: there is no schema, or its name differs from the class's.
        """
        self.config = config
        self.tool_schema = tool_schema  # type: ignore[assignment]  # None only until the next lines
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
        """The configured schema, else the tool's own; what the prompt shows."""
        if self.tool_schema is None and self.schema is not None:
            return OpenAIFunctionToolSchema.model_validate(self.schema)
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> tuple[str, ToolResponse]:
        """Begins a trajectory; the row's `create_kwargs` arrive as keyword arguments.

        Returns the instance id and a response that, if it is not empty, is appended to the user's message.
        """
        return instance_id or str(uuid4()), ToolResponse()

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Answers one call of the model: (response, step reward, metrics).

        Raises:
            ToolError: its text is returned to the model.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define execute")

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float:
        """The reward of the whole trajectory; called once, after it has ended."""
        return 0.0

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Ends a trajectory, however it ended: frees what `create` made."""


class StatefulTool(BaseTool, Generic[State]):
    """Keeps one state for each trajectory, made by `begin` from the row's `create_kwargs`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, State] = {}

    async def begin(self, **create_kwargs: Any) -> State:
        """The state of a new trajectory."""
        raise NotImplementedError

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> tuple[str, ToolResponse]:
        """Begins a trajectory."""
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = await self.begin(**create_kwargs)
        return instance_id, ToolResponse()

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Forgets the trajectory."""
        self._instance_dict.pop(instance_id, None)
