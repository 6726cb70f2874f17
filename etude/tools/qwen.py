"""Qwen-Agent tools: classes with `name`, `description`, `parameters` and `call(params, **kwargs)`.

Invariant: such a class works unchanged, registered with `@register_tool("name")` or named by a configuration's
`class_name`. One object serves all trajectories, as in Qwen-Agent, so it should be stateless. `call` gets the arguments as
JSON text, as in Qwen-Agent's own loop, unless its `params` is hinted as `dict`. Synchronous methods run in threads.

The package `qwen-agent` is not required; if it is installed, its registered tools are found by name.
"""

from __future__ import annotations

import importlib
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from etude.errors import ConfigError, ToolError, one_line
from etude.registry import Registry
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.timeouts import BlockingCalls
from etude.tools.base import BaseTool, Execution
from etude.tools.contract import returned_by
from etude.tools.function_tool import as_response, read_schema
from etude.trace import rollout_trace_op

Class = TypeVar("Class", bound=type)

_PARAMETER_KEYS = ("name", "required")


class ToolClassRegistry(Registry[type]):
    """A registry as in Qwen-Agent: `TOOL_REGISTRY[name]` works, and entries can be overwritten."""

    def __getitem__(self, name: str) -> type:
        return self.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def overwrite(self, name: str, tool_class: type) -> None:
        """Registers `tool_class`, replacing any previous entry."""
        self._items[name] = tool_class


TOOL_REGISTRY = ToolClassRegistry("registered tool")


def register_tool(name: str, allow_overwrite: bool = False) -> Callable[[Class], Class]:
    """Decorator that registers a Qwen-Agent tool class under `name` and sets its `name`.

    Raises:
        ConfigError: the name is taken, or the class sets another one.
    """

    def register(tool_class: Class) -> Class:
        own_name = getattr(tool_class, "name", "") or name
        if own_name != name:
            raise ConfigError(f"register_tool('{name}'): {tool_class.__qualname__} names itself '{own_name}'")
        if allow_overwrite:
            TOOL_REGISTRY.overwrite(name, tool_class)
        else:
            TOOL_REGISTRY.register(name)(tool_class)
        tool_class.name = name  # type: ignore[attr-defined]
        return tool_class

    return register


class QwenBaseTool:
    """A base class for Qwen-Agent tools, for where `qwen_agent.tools.base.BaseTool` is not installed."""

    name: str = ""
    description: str = ""
    parameters: Sequence[Mapping[str, Any]] | Mapping[str, Any] = ()

    def __init__(self, cfg: Mapping[str, Any] | None = None) -> None:
        self.cfg = dict(cfg or {})

    def call(self, params: str | dict[str, Any], **kwargs: Any) -> Any:
        """Executes one tool call; returns text, a dict or list (sent as JSON), or a list of content items."""
        raise NotImplementedError(f"{type(self).__name__} does not define call")

    def _verify_json_format_args(self, params: str | dict[str, Any], strict_json: bool = False) -> dict[str, Any]:
        """Returns the arguments, JSON text or a dict, as a dict; raises `ValueError` if one is missing or the text is not
        JSON."""
        arguments = json.loads(params) if isinstance(params, str) else params
        for name in parameters_schema(self.parameters)["required"]:
            if name not in arguments:
                raise ValueError(f"Parameters {name} is required!")
        return arguments


def is_qwen_shaped(found: object) -> bool:
    """Whether `found` is a class with Qwen-Agent's method `call`, and not a `BaseTool`."""
    return isinstance(found, type) and not issubclass(found, BaseTool) and callable(getattr(found, "call", None))


def registered_tool_class(name: str) -> type | None:
    """Returns the class registered as `name`, here or in an installed Qwen-Agent; None if there is none.

    Raises:
        ConfigError: Qwen-Agent is installed but cannot be imported, and `name` is not registered here.
    """
    if name in TOOL_REGISTRY:
        return TOOL_REGISTRY.get(name)
    try:
        found = importlib.import_module("qwen_agent.tools").TOOL_REGISTRY.get(name)
    except Exception as error:  # importing an installed package may fail in any way
        if isinstance(error, ModuleNotFoundError) and error.name == "qwen_agent":
            return None
        kind = type(error).__name__
        raise ConfigError(f"qwen-agent is installed but cannot be imported: {kind}: {one_line(error)}") from error
    return found if isinstance(found, type) else None


class QwenTool(BaseTool):
    """Wraps a Qwen-Agent tool as a `BaseTool`."""

    def __init__(
        self,
        tool: Any,
        config: dict[str, Any],
        tool_schema: OpenAIFunctionToolSchema | None = None,
        *,
        name: str | None = None,
    ) -> None:
        """`tool` is an object, or a class, which is then constructed, with `config` if the constructor takes one; `name` is
        the registered name.

        Raises:
            ConfigError: the tool has no name, or its `parameters` are in neither of Qwen-Agent's two formats.
        """
        if isinstance(tool, type):
            tool = tool(config) if _takes_config(tool) else tool()
        self._tool = tool
        self._gets_dict = _wants_dict(self._tool.call)
        self._threads = BlockingCalls("etude-qwen-tool", limit=32)
        super().__init__(config, tool_schema or _schema(tool, type(tool).__qualname__, name))

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> Execution:
        """Calls `call(params, **execute_kwargs)` and returns its result as the response."""
        params = dict(parameters) if self._gets_dict else json.dumps(parameters, ensure_ascii=False)
        returned = await self._threads.call(self._tool.call, params, **execute_kwargs)
        with returned_by(self, "call"):
            return _response(returned), 0.0, {}


def parameters_schema(parameters: object, where: str = "parameters") -> dict[str, Any]:
    """Returns a JSON Schema from either of Qwen-Agent's formats: a list of named parameters, or a schema.

    Raises:
        ConfigError: `parameters` is neither.
    """
    if isinstance(parameters, Mapping):
        return {"type": "object", "properties": {}, "required": [], **parameters}
    if not isinstance(parameters, Sequence) or isinstance(parameters, str):
        raise ConfigError(f"{where} must be a list of parameters or a JSON Schema, not {type(parameters).__name__}")
    properties: dict[str, Any] = {}
    required = []
    for number, each in enumerate(parameters):
        if not isinstance(each, Mapping) or not isinstance(each.get("name"), str):
            raise ConfigError(f"{where}[{number}] must be a mapping with a 'name'")
        if each["name"] in properties:
            raise ConfigError(f"{where}[{number}]: there already is a parameter '{each['name']}'")
        properties[each["name"]] = {key: value for key, value in each.items() if key not in _PARAMETER_KEYS}
        if isinstance(each.get("required"), list):  # JSON Schema's keyword for an object, not Qwen-Agent's flag
            properties[each["name"]]["required"] = each["required"]
        elif each.get("required"):
            required.append(each["name"])
    return {"type": "object", "properties": properties, "required": required}


def _schema(tool: Any, class_name: str, registered: str | None) -> OpenAIFunctionToolSchema:
    name = registered or getattr(tool, "name", "")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{class_name} has no name: set it in the class, or decorate it with @register_tool")
    description = getattr(tool, "description", "") or ""
    parameters = parameters_schema(getattr(tool, "parameters", ()), f"{class_name}.parameters")
    function = {"name": name, "description": description, "parameters": parameters}
    return read_schema({"type": "function", "function": function}, class_name)


def _takes_config(tool_class: type) -> bool:
    """Whether the constructor has a positional parameter for Qwen-Agent's `cfg`."""
    try:
        parameters = list(inspect.signature(tool_class).parameters.values())
    except (TypeError, ValueError):
        return False
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def _wants_dict(call: Callable[..., Any]) -> bool:
    """Whether the first parameter of `call` is hinted as a dict, and not as a union with str."""
    try:
        hints = typing.get_type_hints(call)
        first = next(iter(inspect.signature(call).parameters))
    except (NameError, TypeError, ValueError, StopIteration):
        return False
    hint = hints.get(first)
    return isinstance(origin := typing.get_origin(hint) or hint, type) and issubclass(origin, Mapping)


def _response(result: object) -> ToolResponse:
    if isinstance(result, list) and result and all(_is_content(item) for item in result):
        texts = [text for item in result if (text := _part(item, "text"))]
        images = [image for item in result if (image := _part(item, "image"))]
        return ToolResponse(text="\n".join(texts) or None, image=images or None)
    if result is None:
        raise ToolError("the tool returned nothing")
    return as_response(json.dumps(result, ensure_ascii=False, default=str) if isinstance(result, list) else result)


def _is_content(item: object) -> bool:
    """Whether `item` has the shape of Qwen-Agent's `ContentItem`: an object, or a dict, of text, image or file."""
    if isinstance(item, dict):
        return bool(item) and set(item) <= {"text", "image", "file", "audio", "video"}
    return hasattr(item, "text") and hasattr(item, "image")


def _part(item: object, name: str) -> Any:
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)
