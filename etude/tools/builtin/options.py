"""`ToolOptions`: the keys of a built-in tool's `config` as frozen, checked data.

Invariant: an unknown key or an invalid value stops the run at its start with one line that names tool and key. Keys that
limit calls (`timeout` and the like) are the session's and are left to `CallPolicy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from etude.errors import ConfigError
from etude.registry import did_you_mean
from etude.tools.policy import CallPolicy

SESSION_KEYS = frozenset({"type", *(field.name for field in fields(CallPolicy))})
"""Keys of every tool's `config` that are not the tool's own."""

DEFAULT_TIMEOUT = CallPolicy.timeout


class ToolOptions(BaseModel):
    """Base of a tool's own options; numbers may be written as text, as environment variables are."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Options = TypeVar("Options", bound=ToolOptions)


def read_options(kind: type[Options], config: Mapping[str, Any], tool_name: str) -> Options:
    """The tool's own part of `config`; keys that are null have their defaults.

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid; names tool and key.
    """
    own = {key: value for key, value in config.items() if key not in SESSION_KEYS and value is not None}
    known = [*kind.model_fields, *sorted(SESSION_KEYS)]
    for key in own:
        if key not in kind.model_fields:
            raise ConfigError(f"tool '{tool_name}': unknown key config.{key}{did_you_mean(str(key), known)}")
    try:
        return kind.model_validate(own)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(["config", *map(str, first["loc"])])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"tool '{tool_name}': {place}: {message}") from error
