"""`CallPolicy`: the keys of a tool's `config` that bound its calls.

Invariant: every tool has a time limit and a text limit, whether its `config` mentions them or not. Applying them is the
session's business; all other keys of `config` belong to the tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from etude.errors import ConfigError
from etude.registry import did_you_mean


class OnException(str, Enum):
    """What an exception of `execute` means that is neither a `ToolError` nor broken infrastructure."""

    TELL = "tell"  # the model is told in one line, and the trajectory goes on
    INFRASTRUCTURE = "infrastructure"  # the trajectory is retried from fresh state, then dropped
    STOP = "stop"  # the run ends


@dataclass(frozen=True)
class CallPolicy:
    """`timeout` in seconds, for each call of each method; `max_response_chars` in characters of response text."""

    timeout: float = 60.0
    max_response_chars: int = 1_000_000
    on_exception: OnException = OnException.TELL

    @classmethod
    def from_config(cls, config: Mapping[str, object] | None, tool_name: str) -> CallPolicy:
        """The policy in a tool's `config`; a key that is absent or null has its default.

        Raises:
            ConfigError: a value makes no sense; names tool and key.
        """
        config = config or {}
        timeout = config.get("timeout")
        limit = config.get("max_response_chars")
        reaction = config.get("on_exception")
        return cls(
            cls.timeout if timeout is None else _positive(timeout, (int, float), tool_name, "timeout"),
            cls.max_response_chars if limit is None else int(_positive(limit, (int,), tool_name, "max_response_chars")),
            cls.on_exception if reaction is None else _reaction(reaction, tool_name),
        )


def _positive(value: object, types: tuple[type, ...], tool_name: str, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, types) or not 0 < value < float("inf"):  # type: ignore[operator]
        raise ConfigError(f"tool '{tool_name}': config.{key} must be a positive number, not {value!r}")
    return value  # type: ignore[return-value]


def _reaction(value: object, tool_name: str) -> OnException:
    known = [reaction.value for reaction in OnException]
    if value not in known:
        hint = did_you_mean(str(value), known)
        raise ConfigError(
            f"tool '{tool_name}': config.on_exception must be one of {', '.join(known)}, not {value!r}{hint}"
        )
    return OnException(value)
