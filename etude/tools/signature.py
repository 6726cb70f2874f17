"""`FunctionSignature`: a plain function's parameters as JSON Schema, and a model's arguments as that function wants them.

Invariant: the schema shown and the values handed over come from the same type hints: a parameter hinted as a model class
is described by that class's schema and receives an object of it.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from etude.errors import ConfigError, ToolError, one_line

_SECTION = re.compile(r"(?m)^[ \t]*(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Notes?):[ \t]*$")
_ENTRY = re.compile(r"(\w+)[ \t]*(?:\([^\n]*?\))?[ \t]*:[ \t]*(.*)")


class _Untitled(GenerateJsonSchema):
    """JSON Schema without a generated title for every field: the model reads enough already."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class FunctionSignature:
    """The parameters of `function`; with `inferred`, each must have a type hint.

    Raises:
        ConfigError: `inferred`, and a parameter has no hint, cannot be named in JSON (`*args`, `**kwargs`,
            positional-only), or has a hint that JSON Schema cannot express; names function and parameter.
    """

    def __init__(self, function: Callable[..., object], *, inferred: bool) -> None:
        self._where = f"function tool {function.__module__}.{function.__qualname__}"
        self._parameters = inspect.signature(function).parameters
        hints = self._hints(function)
        if inferred:
            self._check(hints)
        self._adapters: dict[str, TypeAdapter[Any]] = {
            name: self._adapter(name, hints[name]) for name in self._parameters if name in hints and inferred
        }
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        self.description, self._descriptions = read_docstring(inspect.getdoc(function) or "")

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
            ToolError: one is missing, unknown or of the wrong type; the text tells the model which.
        """
        unknown = [name for name in arguments if name not in self._parameters and not self._takes_any]
        if unknown:
            raise ToolError(f"unexpected argument '{unknown[0]}' (expected: {', '.join(self._parameters) or 'none'})")
        for name, parameter in self._parameters.items():
            optional = parameter.default is not parameter.empty or parameter.kind in (2, 4)
            if name not in arguments and not optional:
                raise ToolError(f"missing argument '{name}'")
        return {name: self._converted(name, value) for name, value in arguments.items()}

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
            raise ConfigError(f"{self._where}: cannot read its type hints: {one_line(error)}") from error

    def _check(self, hints: Mapping[str, Any]) -> None:
        for name, parameter in self._parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ConfigError(
                    f"{self._where}: parameter '{parameter}' cannot be called by name; use named parameters or pass schema="
                )
            if name not in hints:
                raise ConfigError(f"{self._where}: parameter '{name}' has no type hint; add one or pass schema=")

    def _adapter(self, name: str, hint: Any) -> TypeAdapter[Any]:
        try:
            return TypeAdapter(hint)
        except (PydanticSchemaGenerationError, PydanticUserError) as error:
            raise ConfigError(f"{self._where}: the hint of '{name}' has no JSON Schema: {one_line(error)}") from error

    def _add_default(self, schema: dict[str, Any], name: str) -> None:
        default = self._parameters[name].default
        if default is inspect.Parameter.empty:
            return
        try:
            schema["default"] = self._adapters[name].dump_python(default, mode="json", warnings="error")
        except ValueError as error:  # pydantic's serialisation errors are ValueErrors
            raise ConfigError(
                f"{self._where}: the default of '{name}' does not fit its hint: {one_line(error)}"
            ) from error


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(description, parameter → description) of a Google-style docstring."""
    sections = _SECTION.split(text)
    described: dict[str, str] = {}
    for title, body in zip(sections[1::2], sections[2::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            described = _entries(body)
    return " ".join(sections[0].split()), described


def _entries(body: str) -> dict[str, str]:
    lines = [line for line in body.splitlines() if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    entries: dict[str, str] = {}
    current = ""
    for line, indent in zip(lines, indents, strict=True):
        match = _ENTRY.fullmatch(line.strip()) if indent == indents[0] else None
        if match:
            current = match[1]
            entries[current] = match[2].strip()
        elif current:
            entries[current] = f"{entries[current]} {line.strip()}".strip()
    return entries
