"""`FunctionSignature`: a function's parameters as JSON Schema, and a model's arguments converted to its types.

Invariant: the schema and the converted values come from the same type hints: a parameter hinted as a model class
is described by that class's schema and receives an object of it.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import docstring_parser
from docstring_parser import DocstringStyle
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from etude.errors import ConfigError, ToolError, one_line
from etude.registry import did_you_mean


class _Untitled(GenerateJsonSchema):
    """JSON Schema without generated field titles, which only cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class FunctionSignature:
    """The parameters of `function`; with `inferred`, each must have a type hint.

    Without `inferred`, the schema is the user's, and only hinted arguments are converted.

    Raises:
        ConfigError: `inferred`, and a parameter has no hint, cannot be named in JSON (`*args`, `**kwargs`,
            positional-only), or has a hint that JSON Schema cannot express, or the docstring describes an unknown
            parameter; names function and parameter.
    """

    def __init__(self, function: Callable[..., object], *, inferred: bool) -> None:
        self._where = f"function tool {function.__module__}.{function.__qualname__}"
        self._parameters = inspect.signature(function).parameters
        self._inferred = inferred
        hints = self._hints(function)
        self.description, self._descriptions = read_docstring(inspect.getdoc(function) or "")
        if inferred:
            self._check(hints)
        adapters = {name: self._adapter(name, hints[name]) for name in self._parameters if name in hints}
        self._adapters = {name: adapter for name, adapter in adapters.items() if adapter is not None}
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())

    def parameters_schema(self) -> dict[str, Any]:
        """The `parameters` object of the tool's schema."""
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
        """`arguments` as keyword arguments of the function, converted to its hints.

        Raises:
            ToolError: one is missing, unknown or of the wrong type; the text names it for the model.
        """
        if arguments.keys() != self._parameters.keys():
            self._check_names(arguments)
        return {name: self._converted(name, value) for name, value in arguments.items()}

    def _check_names(self, arguments: Mapping[str, Any]) -> None:
        unknown = [name for name in arguments if name not in self._parameters and not self._takes_any]
        if unknown:
            raise ToolError(f"unexpected argument '{unknown[0]}' (expected: {', '.join(self._parameters) or 'none'})")
        for name, parameter in self._parameters.items():
            optional = parameter.default is not parameter.empty or parameter.kind in (2, 4)
            if name not in arguments and not optional:
                raise ToolError(f"missing argument '{name}'")

    def _converted(self, name: str, value: Any) -> Any:
        if name not in self._adapters:
            return value
        try:
            return self._adapters[name].validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = "".join(f".{part}" for part in first["loc"])
            raise ToolError(f"argument '{name}{place}': {first['msg']}") from error

    def _hints(self, function: Callable[..., object]) -> dict[str, Any]:
        try:
            return typing.get_type_hints(function, include_extras=True)
        except (NameError, TypeError) as error:
            if not self._inferred:
                return {}
            raise ConfigError(f"{self._where}: cannot read its type hints: {one_line(error)}") from error

    def _check(self, hints: Mapping[str, Any]) -> None:
        for name, parameter in self._parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ConfigError(
                    f"{self._where}: parameter '{parameter}' cannot be called by name; use named parameters or pass schema="
                )
            if name == "self" and name not in hints:
                raise ConfigError(
                    f"{self._where} is a method: decorate a plain function, or derive a class from BaseTool"
                )
            if name not in hints:
                raise ConfigError(f"{self._where}: parameter '{name}' has no type hint; add one or pass schema=")
        for name in self._descriptions:
            if name not in self._parameters:
                hint = did_you_mean(name, self._parameters)
                raise ConfigError(f"{self._where}: its docstring describes '{name}', which is not a parameter{hint}")

    def _adapter(self, name: str, hint: Any) -> TypeAdapter[Any] | None:
        """A converter to `hint`; None if there is none and none is needed."""
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
            if default is None:  # which the serialiser accepts for any hint
                self._adapters[name].validate_python(None)
            schema["default"] = self._adapters[name].dump_python(default, mode="json", warnings="error")
        except ValueError as error:  # as pydantic's errors are
            raise ConfigError(
                f"{self._where}: the default of '{name}' does not fit its hint: {one_line(error)}"
            ) from error


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(description, parameter → description) of a Google-style docstring, each on one line."""
    try:
        parsed = docstring_parser.parse(text, style=DocstringStyle.GOOGLE)
    except docstring_parser.ParseError:
        return " ".join(text.split()), {}
    whole = f"{parsed.short_description or ''} {parsed.long_description or ''}"
    described = {each.arg_name.lstrip("*"): " ".join((each.description or "").split()) for each in parsed.params}
    return " ".join(whole.split()), described
