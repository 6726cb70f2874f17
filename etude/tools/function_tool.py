"""`@function_tool`: turns a function into a tool.

Invariant: the decorated name can still be called as the function. A function tool has no state of its own: its
`create`, `calc_reward` and `release` do nothing. Synchronous functions run in a bounded set of threads, one per
tool, so that a hanging tool starves no other; a time limit abandons a thread but cannot kill it: write long work as
`async def`.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import ValidationError

from etude.bounded import BlockingCalls
from etude.errors import ConfigError
from etude.registry import Registry, import_module
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.tools.base import BaseTool
from etude.tools.options import CallPolicy, ToolOptions, read_options
from etude.tools.signature import FunctionSignature
from etude.trace import rollout_trace_op

Function = TypeVar("Function", bound=Callable[..., object])
Schema = OpenAIFunctionToolSchema | Mapping[str, Any]

_THREADS = 32  # at once, for one tool


class FunctionTool(BaseTool):
    """A tool around one function; calling it calls the function."""

    def __init__(
        self,
        function: Callable[..., object],
        name: str | None = None,
        schema: Schema | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Derives the schema from type hints and docstring unless one is given; `config` holds call limits.

        Raises:
            ConfigError: the schema cannot be derived, is invalid, or is not named `name`; `config` has an unknown key
                or an invalid value.
        """
        _check_kind(function)
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._signature = FunctionSignature(function, inferred=schema is None)
        made = self._infer(name or function.__name__) if schema is None else read_schema(schema, function.__qualname__)
        if name is not None and made.function.name != name:
            raise ConfigError(f"function tool '{name}': its schema says '{made.function.name}'")
        super().__init__(dict(config or {}), made)
        read_options(ToolOptions, self.config, made.function.name)  # it has no keys of its own
        CallPolicy.from_config(self.config, made.function.name)
        self._threads = BlockingCalls(f"etude-tool-{self.name}", limit=_THREADS)
        functools.update_wrapper(self, function)

    def configured(self, config: Mapping[str, Any], schema: Schema | None = None) -> FunctionTool:
        """This tool with `config` merged over its own, and with `schema` instead of its own if given.

        Raises:
            ConfigError: as the constructor.
        """
        return FunctionTool(self._function, None, schema or self.tool_schema, {**self.config, **config})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The undecorated function."""
        return self._function(*args, **kwargs)

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Calls the function with the model's arguments; a row's `execute_kwargs` override them.

        Raises:
            ToolError: an argument is missing, unknown or of the wrong type, or the function raised it.
        """
        arguments = self._signature.bind({**parameters, **execute_kwargs})
        function: Callable[..., Any] = self._function
        if self._is_async:
            result = await function(**arguments)
        else:
            result = await self._threads.run(function, **arguments)
            result = await result if inspect.isawaitable(result) else result
        return normalize_result(result)

    def _infer(self, name: str) -> OpenAIFunctionToolSchema:
        function: dict[str, Any] = {"name": name, "description": self._signature.description}
        function["parameters"] = self._signature.parameters_schema()
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


FUNCTION_TOOLS: Registry[FunctionTool] = Registry("function tool")


@overload
def function_tool(name: Callable[..., object], /) -> FunctionTool: ...


@overload
def function_tool(
    name: str | None = None, *, schema: Schema | None = None, config: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., object]], FunctionTool]: ...


def function_tool(
    name: Callable[..., object] | str | None = None,
    *,
    schema: Schema | None = None,
    config: Mapping[str, Any] | None = None,
) -> FunctionTool | Callable[[Callable[..., object]], FunctionTool]:
    """Decorator that turns a sync or async function into a tool.

    Written as `@function_tool`, `@function_tool("name")` or `@function_tool(name="name", schema={…}, config={…})`;
    `config` holds call limits, such as `{"timeout": 5}`.

    The function returns a `ToolResponse`, text, a dict (sent as JSON), or a tuple of one of these with a step reward
    and a dict of metrics.

    Raises:
        ConfigError: the name is taken, or no schema can be derived from the function; names function and parameter.
    """
    if callable(name):
        return function_tool()(name)

    def decorate(function: Callable[..., object]) -> FunctionTool:
        tool = FunctionTool(function, name, schema, config)
        return FUNCTION_TOOLS.register(tool.name)(tool)

    return decorate


def load_function_tools(path: str | Path) -> list[BaseTool]:
    """The function tools that the file (or dotted module) `path` defines, in the order of their definition.

    Raises:
        ConfigError: it cannot be imported, or defines no tool.
    """
    module = import_module(str(path))
    tools = [tool for tool in vars(module).values() if isinstance(tool, FunctionTool)]
    own = [tool for tool in tools if tool.__module__ == module.__name__]
    if not own:
        raise ConfigError(f"{path} defines no tool: decorate a function with @function_tool")
    return list(dict.fromkeys(own))


def _check_kind(function: Callable[..., object]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"function tool {function.__module__}.{function.__qualname__}: it yields; return one answer")
    if isinstance(function, type):
        raise ConfigError(f"{function.__qualname__} is a class: derive it from BaseTool, or decorate a function")


def normalize_result(result: object) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Converts a function's return value to that of `BaseTool.execute`; unlisted types become their `str`.

    Raises:
        TypeError: a tuple that is empty or has more than three entries.
    """
    reward: Any = None
    metrics: Any = None
    if isinstance(result, tuple):
        if not 1 <= len(result) <= 3:
            raise TypeError(f"a tool function returns (response[, reward[, metrics]]), not a tuple of {len(result)}")
        result, reward, metrics = (*result, None, None)[:3]
    return _response(result), 0.0 if reward is None else reward, {} if metrics is None else metrics


def _response(result: object) -> ToolResponse:
    if isinstance(result, ToolResponse):
        return result
    if isinstance(result, dict):
        return ToolResponse(text=json.dumps(result, ensure_ascii=False, default=str))
    return ToolResponse(text=str(result))


def read_schema(raw: object, where: str) -> OpenAIFunctionToolSchema:
    """Validates a tool's schema.

    Raises:
        ConfigError: it is not an OpenAI function schema; the message begins with `where` and names the place in it.
    """
    try:
        schema = OpenAIFunctionToolSchema.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(["tool_schema", *map(str, first["loc"])])
        raise ConfigError(f"{where}: {place}: {first['msg']}") from error
    parameters = schema.function.parameters
    absent = [name for name in parameters.required if name not in parameters.properties]
    if absent:
        raise ConfigError(f"{where}: tool_schema requires '{absent[0]}', which is not among its properties")
    return schema
