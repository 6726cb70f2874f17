"""`@function_tool`: turns a function into a tool.

Invariant: the decorated name can still be called as the function. Schema and argument conversion come from the same type
hints: a parameter hinted as a pydantic model is described by the model's schema and receives an instance of it. A function
tool is stateless: its `create`, `calc_reward` and `release` do nothing. Synchronous functions run in a bounded thread pool
per tool, so that a hanging tool starves no other. A time limit abandons a thread but cannot kill it: write long-running
tools as `async def`.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, overload

import docstring_parser
from docstring_parser import DocstringStyle
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from etude.errors import WARNING, ConfigError, ToolError, one_line, user_file
from etude.registry import FAULTS, USER_MODULE, Registry, did_you_mean, import_module, one_edit_from
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.timeouts import BlockingCalls
from etude.tools.base import BaseTool, Execution, function_schema
from etude.tools.contract import returned_by, returns_written_tuple
from etude.tools.options import CallPolicy, ToolOptions, read_options
from etude.trace import rollout_trace_op

logger = logging.getLogger(__name__)

Schema = OpenAIFunctionToolSchema | Mapping[str, Any]

_THREADS = 32  # per tool


class _Untitled(GenerateJsonSchema):
    """JSON Schema without generated field titles, which only cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class FunctionSignature:
    """The parameters of `function`, without those that a partial sets. With `inferred`, the schema is derived from the type
    hints, so each parameter needs one; otherwise the user provides the schema, and only hinted arguments are converted.

    Raises:
        ConfigError: a parameter cannot be given by name; or `inferred`, and a parameter has no hint, cannot be named in JSON
            (`*args`, `**kwargs`), or has a hint that JSON Schema cannot express, or the docstring describes an unknown
            parameter; names function and parameter.
    """

    def __init__(self, function: Callable[..., object], *, inferred: bool) -> None:
        written, self._where = _written(function), f"function tool {_label(function)}"
        bound = function.keywords if isinstance(function, functools.partial) else {}
        self._parameters = {name: p for name, p in self._read_parameters(function).items() if name not in bound}
        self._inferred = inferred
        hints = self._read_hints(written)
        self.description, self._descriptions = read_docstring(inspect.getdoc(written) or "")
        if inferred:
            self._check(hints)
        adapters = {name: self._make_adapter(name, hints[name]) for name in self._parameters if name in hints}
        self._adapters = {name: adapter for name, adapter in adapters.items() if adapter is not None}
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())

    def check_schema(self, schema: OpenAIFunctionToolSchema) -> None:
        """Checks that the function takes what a schema of the user's offers.

        Raises:
            ConfigError: it does not; names the argument.
        """
        offered = schema.function.parameters.properties
        if unknown := [name for name in offered if name not in self._parameters and not self._takes_any]:
            hint = did_you_mean(unknown[0], self._parameters)
            raise ConfigError(f"{self._where}: its schema offers '{unknown[0]}', which it does not take{hint}")

    def parameters_schema(self) -> dict[str, Any]:
        """Returns the `parameters` object of the tool's schema."""
        entries = [(name, "validation", adapter) for name, adapter in self._adapters.items()]
        try:
            schemas, shared = TypeAdapter.json_schemas(entries, schema_generator=_Untitled)  # type: ignore[arg-type]
        except PydanticUserError as error:
            raise ConfigError(f"{self._where}: a hint has no JSON Schema: {one_line(error)}") from error
        properties: dict[str, Any] = {}
        for (name, _), schema in schemas.items():
            properties[name] = dict(schema)
            if name in self._descriptions:
                properties[name]["description"] = self._descriptions[name]
            self._add_default(properties[name], name)
        required = [name for name, p in self._parameters.items() if p.default is p.empty]
        made: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
        return made | ({"$defs": shared["$defs"]} if "$defs" in shared else {})

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Converts `arguments` to keyword arguments of the function, according to its type hints.

        Raises:
            ToolError: an argument is missing, unknown or of the wrong type; the text names it for the model.
        """
        if arguments.keys() != self._parameters.keys():
            self._check_names(arguments)
        return {name: self._convert(name, value) for name, value in arguments.items()}

    def _check_names(self, arguments: Mapping[str, Any]) -> None:
        unknown = [name for name in arguments if name not in self._parameters and not self._takes_any]
        if unknown:
            raise ToolError(f"unexpected argument '{unknown[0]}' (expected: {', '.join(self._parameters) or 'none'})")
        for name, parameter in self._parameters.items():
            optional = parameter.default is not parameter.empty or parameter.kind in (2, 4)
            if name not in arguments and not optional:
                raise ToolError(f"missing argument '{name}'")

    def _convert(self, name: str, value: Any) -> Any:
        if name not in self._adapters:
            return value
        try:
            return self._adapters[name].validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = "".join(f".{part}" for part in first["loc"])
            raise ToolError(f"argument '{name}{place}': {first['msg']}") from error

    def _read_parameters(self, function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
        advice = "wrap it in a def with named, hinted parameters"
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:  # some C functions
            raise ConfigError(f"{self._where}: Python cannot tell its parameters: {advice}") from error
        for parameter in parameters.values():
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigError(f"{self._where}: parameter '{parameter}' cannot be called by name: {advice}")
        return parameters

    def _read_hints(self, function: Callable[..., object]) -> dict[str, Any]:
        try:
            return typing.get_type_hints(function, include_extras=True)
        except (NameError, TypeError) as error:
            if not self._inferred:
                return {}
            raise ConfigError(f"{self._where}: cannot read its type hints: {one_line(error)}") from error

    def _check(self, hints: Mapping[str, Any]) -> None:
        for name, parameter in self._parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigError(
                    f"{self._where}: parameter '{parameter}' cannot be called by name; use named parameters or pass schema="
                )
            if name == "self" and name not in hints:
                raise ConfigError(
                    f"{self._where} is a method: decorate a plain function, or derive a class from BaseTool"
                )
            if name not in hints:
                raise ConfigError(f"{self._where}: parameter '{name}' has no type hint; add one or pass schema=")
            if _is_injected(hints[name]):
                raise ConfigError(
                    f"{self._where}: parameter '{name}' is injected (InjectedToolArg), and the model would be asked for it",
                    fix="pass schema= without it, and give it in the row's execute_kwargs",
                )
        for name in self._descriptions:
            if name not in self._parameters:
                hint = did_you_mean(name, self._parameters)
                raise ConfigError(f"{self._where}: its docstring describes '{name}', which is not a parameter{hint}")

    def _make_adapter(self, name: str, hint: Any) -> TypeAdapter[Any] | None:
        """Returns a converter to `hint`; None for `*args` and `**kwargs`, and for a hint that pydantic cannot handle
        unless the schema is inferred from it."""
        parameter = self._parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return None
        try:
            return TypeAdapter(hint)
        except (PydanticSchemaGenerationError, PydanticUserError) as error:
            if not self._inferred:
                return None
            raise ConfigError(f"{self._where}: the hint of '{name}' has no JSON Schema: {one_line(error)}") from error

    def _add_default(self, schema: dict[str, Any], name: str) -> None:
        default = self._parameters[name].default
        if default is inspect.Parameter.empty:
            return
        try:
            if default is None:  # the serializer would accept None for any hint
                self._adapters[name].validate_python(None)
            schema["default"] = self._adapters[name].dump_python(default, mode="json", warnings="error")
        except ValueError as error:  # the base class of pydantic's errors
            raise ConfigError(
                f"{self._where}: the default of '{name}' does not fit its hint: {one_line(error)}"
            ) from error


def _is_injected(hint: object) -> bool:
    """Whether LangChain keeps a parameter with this hint from the model (`Annotated[str, InjectedToolArg]`)."""
    marks = [mark if isinstance(mark, type) else type(mark) for mark in getattr(hint, "__metadata__", ())]
    return any(base.__name__ == "InjectedToolArg" for mark in marks for base in mark.__mro__)


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Parses a Google-style docstring into (description, {parameter: description}), each text on one line."""
    try:
        parsed = docstring_parser.parse(text, style=DocstringStyle.GOOGLE)
    except docstring_parser.ParseError:
        return " ".join(text.split()), {}
    whole = f"{parsed.short_description or ''} {parsed.long_description or ''}"
    described = {each.arg_name.lstrip("*"): " ".join((each.description or "").split()) for each in parsed.params}
    return " ".join(whole.split()), described


class FunctionTool(BaseTool):
    """Wraps a function as a tool; calling the tool calls the function.

    `decorated_in`: the module that made it a tool with `@function_tool`, if any.
    """

    decorated_in: str | None = None

    def __init__(
        self,
        function: Callable[..., object],
        name: str | None = None,
        schema: Schema | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Derives the schema from type hints and docstring unless `schema` is given; `config` holds call limits.

        Raises:
            ConfigError: the schema cannot be derived, is invalid, or is not named `name`; or `config` has an unknown key
                or an invalid value.
        """
        _check_kind(function)
        self._function = function
        self._signature = FunctionSignature(function, inferred=schema is None)
        if schema is None:
            known = name or getattr(function, "__name__", None)
            if not isinstance(known, str):
                where = f"function tool {_label(function)}"
                raise ConfigError(f'{where}: it has no name: give one, @function_tool("name")')
            inferred = function_schema(known, self._signature.description)
            inferred["function"]["parameters"] = self._signature.parameters_schema()
            made = OpenAIFunctionToolSchema.model_validate(inferred)
        else:
            made = read_schema(schema, _label(function))
        self._signature.check_schema(made)
        if name is not None and made.function.name != name:
            raise ConfigError(f"function tool '{name}': its schema says '{made.function.name}'")
        super().__init__(dict(config or {}), made)
        read_options(ToolOptions, self.config, made.function.name)  # accepts no keys besides the call policy's
        CallPolicy.from_config(self.config, made.function.name)
        self._threads = BlockingCalls(f"etude-tool-{self.name}", limit=_THREADS)
        self._pays = pays_in_tuples(_written(function))
        functools.update_wrapper(self, function)

    def configured(self, config: Mapping[str, Any], schema: Schema | None = None) -> FunctionTool:
        """Returns a copy of this tool with `config` merged over its config, and `schema`, if given, replacing its schema.

        Raises:
            ConfigError: as the constructor.
        """
        return FunctionTool(self._function, None, schema or self.tool_schema, {**self.config, **config})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the undecorated function."""
        return self._function(*args, **kwargs)

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> Execution:
        """Calls the function with the model's arguments; a row's `execute_kwargs` override them.

        Raises:
            ToolError: an argument is missing, unknown or of the wrong type, or the function raised a ToolError.
        """
        arguments = self._signature.bind({**parameters, **execute_kwargs})
        returned = await self._threads.call(self._function, **arguments)
        with returned_by(self, self.name):
            return normalize_result(returned, pays=self._pays, name=self.name)


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

    Use it as `@function_tool`, `@function_tool("name")` or `@function_tool(name="name", schema={…}, config={…})`;
    `config` holds call limits, such as `{"timeout": 5}`.

    The function returns a `ToolResponse`, text, a dict (sent as JSON), or a tuple of one of these with a step reward
    and a dict of metrics: see `pays_in_tuples`.

    Raises:
        ConfigError: the name is taken, or no schema can be derived from the function; names function and parameter.
    """
    given = None if callable(name) else name
    if not isinstance(given, str | None):
        raise ConfigError(f"@function_tool is for functions, not for an object of type {type(given).__name__}")
    module = sys._getframe(1).f_globals
    decorated_in = module.get("__name__")

    def decorate(function: Callable[..., object]) -> FunctionTool:
        try:
            tool = FunctionTool(function, given, schema, config)
        except ConfigError as error:
            if not str(decorated_in).startswith(USER_MODULE):
                raise
            module.setdefault(FAULTS, []).append(error)  # raised after the file, which may have others
            return typing.cast(FunctionTool, function)
        tool.decorated_in = decorated_in
        return FUNCTION_TOOLS.register(tool.name)(tool)

    return decorate(name) if callable(name) else decorate


def load_function_tools(path: str | Path) -> list[BaseTool]:
    """Returns the function tools of the file (or dotted module) `path`, in the order of their definition: its own functions,
    and others that it decorates.

    Raises:
        ConfigError: the file cannot be imported, or defines no tool.
    """
    module = import_module(str(path))
    tools = [tool for tool in vars(module).values() if isinstance(tool, FunctionTool)]
    own = [tool for tool in tools if module.__name__ in (tool.__module__, tool.decorated_in)]
    if not own:
        raise ConfigError(f"{path} defines no tool: decorate a function with @function_tool")
    return list(dict.fromkeys(own))


def _check_kind(function: Callable[..., object]) -> None:
    if not callable(function):
        raise ConfigError(f"@function_tool is for functions, not for an object of type {type(function).__name__}")
    if isinstance(function, type):
        raise ConfigError(f"{function.__qualname__} is a class: derive it from BaseTool, or decorate a function")
    written = _written(function)
    if inspect.isgeneratorfunction(written) or inspect.isasyncgenfunction(written):
        raise ConfigError(f"function tool {_label(function)}: it yields; return one answer")


def _written(function: Callable[..., object]) -> Callable[..., object]:
    """The function whose hints and docstring are those of `function`: a partial's, or the method `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__name__") else type(function).__call__


def _label(function: Callable[..., object]) -> str:
    written = _written(function)
    name = getattr(written, "__qualname__", type(function).__name__)
    module, code = getattr(written, "__module__", None) or "builtins", getattr(written, "__code__", None)
    if module.startswith(USER_MODULE) and code is not None and (file := user_file(code.co_filename)):
        return f"{name} ({file}:{code.co_firstlineno})"
    return f"{module}.{name}"


@functools.lru_cache(maxsize=1024)
def pays_in_tuples(function: Callable[..., object]) -> bool:
    """Whether a tuple that `function` returns holds a step reward: its return hint names one; without a hint that says
    anything, its code returns one that it writes itself. What `eval` made of a model's words is text."""
    try:
        hint = typing.get_type_hints(function).get("return", Any)
    except (NameError, TypeError):
        hint = Any
    return returns_written_tuple(function) if hint in (Any, object) else _names_tuple(hint)


def _names_tuple(hint: Any) -> bool:
    origin = typing.get_origin(hint) or getattr(hint, "__value__", hint)  # of `type Answer = ...`, its value
    if isinstance(origin, type) and issubclass(origin, tuple):
        return True
    return origin in (typing.Union, types.UnionType) and any(map(_names_tuple, typing.get_args(hint)))


@functools.lru_cache(maxsize=1024)
def _tell_unpaid(name: str) -> None:
    """Once for each tool: a reward that its author meant would be lost without a word."""
    line = f"tool '{name}' returned a tuple that neither return hint nor code name: it is sent as text"
    logger.warning(
        WARNING, line, "if its second value is a step reward, write -> tuple[str, float]; if not, return str(…)"
    )


def normalize_result(result: object, *, pays: bool = True, name: str = "") -> Execution:
    """Converts what the function of tool `name` returned to what `BaseTool.execute` does, (response, reward, metrics).
    `pays`: a tuple is these, otherwise it is text like any other value.

    Raises:
        TypeError: the value is a tuple that is empty or has more than three entries, or a pair that begins with no answer.
    """
    reward: Any = None
    metrics: Any = None
    if isinstance(result, tuple) and not pays:
        _tell_unpaid(name)
    elif isinstance(result, tuple):
        if not 1 <= len(result) <= 3:
            raise TypeError(f"must return (response[, reward[, metrics]]), not a tuple of {len(result)}")
        if len(result) == 2 and not isinstance(result[0], str | dict | ToolResponse):
            raise TypeError(
                f"returned a pair that begins with a {type(result[0]).__name__}; the second value of a pair is "
                "a step reward, and the first one text, a dict or a ToolResponse: return one text, such as str((a, b))"
            )
        result, reward, metrics = (*result, None, None)[:3]
    return as_response(result), 0.0 if reward is None else reward, {} if metrics is None else metrics


def as_response(result: object) -> ToolResponse:
    """Returns a `ToolResponse` unchanged, a dict as JSON text, of another framework's tool message (LangChain's) what it
    says, anything else as its `str`.

    Raises:
        ToolError: the message says that the call failed.
        TypeError: the `str` says nothing but the type and an address: of an iterator, or an object without one of its own.
    """
    if isinstance(result, ToolResponse):
        return result
    if isinstance(result, dict):
        return ToolResponse(text=json.dumps(result, ensure_ascii=False, default=str))
    if hasattr(result, "tool_call_id") and isinstance(said := getattr(result, "content", None), str):
        if getattr(result, "status", None) == "error":
            raise ToolError(said)
        return ToolResponse(text=said)
    kind = type(result)
    if isinstance(result, Iterator) or (kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__):
        raise TypeError(f"returned a {kind.__name__}, of which a model reads nothing: return text or a dict")
    return ToolResponse(text=str(result))


def read_schema(raw: object, where: str) -> OpenAIFunctionToolSchema:
    """Validates a tool's schema.

    Raises:
        ConfigError: `raw` is not an OpenAI function schema, or has a misspelt key; the message begins with `where` and
            names the place in it.
    """
    try:
        schema = OpenAIFunctionToolSchema.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(["tool_schema", *map(str, first["loc"])])
        raise ConfigError(f"{where}: {place}: {first['msg']}") from error
    parameters = schema.function.parameters
    for part in (schema.function, parameters):  # further keys are kept, but not misspelt ones
        for key in part.model_extra or {}:
            if meant := one_edit_from(key, type(part).model_fields):
                raise ConfigError(f"{where}: tool_schema has the unknown key '{key}'; did you mean '{meant}'?")
    absent = [name for name in parameters.required if name not in parameters.properties]
    if absent:
        raise ConfigError(f"{where}: tool_schema requires '{absent[0]}', which is not among its properties")
    return schema
