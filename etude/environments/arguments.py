"""Checks the `args` of an entry of `env` against what takes them, so that an error names the key."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from etude.errors import ConfigError
from etude.registry import unknown_name


def check_arguments(function: Callable[..., Any], args: Mapping[str, Any], where: str) -> None:
    """Checks names and types of `args`, which `function` (or a class) is to take.

    Raises:
        ConfigError: it does not take an argument, or one of that type, or one is missing.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    for key in () if any(each.kind is each.VAR_KEYWORD for each in parameters) else args:
        if key not in known:
            raise unknown_name(ConfigError, f"{where}: args: unknown argument '{key}'", key, known)
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and each.default is each.empty and each.name not in args:
            raise ConfigError(f"{where}: '{each.name}' is missing")
    check_types(function, args, where)


def check_types(function: Callable[..., Any], args: Mapping[str, Any], where: str) -> None:
    """Checks the types of those of `args` that `function` (or a class) annotates.

    Raises:
        ConfigError: one has another type.
    """
    try:
        hints = get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    except (NameError, TypeError):  # annotations that cannot be resolved
        return
    for key, value in args.items():
        try:
            if value is not None:
                TypeAdapter(hints.get(key, Any)).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{where}: args.{key}: {error.errors()[0]['msg']}, not {value!r:.80}") from error
        except PydanticUserError:  # a type that pydantic does not know
            continue
