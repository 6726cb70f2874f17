"""`CallPolicy`: the keys of a tool's `config` that limit, cache, record and inject faults into its calls.

Invariant: every tool has a time limit and a text limit, whether its `config` sets them or not. Applying them is
left to `ToolRuntime` and the session; all other keys of `config` belong to the tool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeVar

from etude.errors import ConfigError
from etude.registry import did_you_mean
from etude.tools.truncation import SIDES

E = TypeVar("E", bound=Enum)


class OnException(str, Enum):
    """How to handle an exception of `execute` that is neither a `ToolError` nor an infrastructure failure."""

    TELL = "tell"  # the model gets it as one line, and the trajectory goes on
    INFRASTRUCTURE = "infrastructure"  # the trajectory is retried from fresh state, then dropped
    STOP = "stop"  # the run ends


class LimitScope(str, Enum):
    """Which processes share a limit."""

    PROCESS = "process"
    CLUSTER = "cluster"  # all processes of the Ray cluster; without one, this process


class ReplayMode(str, Enum):
    """How a recorded call is looked up."""

    STRICT = "strict"  # by the call's arguments
    ORDER = "order"  # by its place in the trajectory, whatever the arguments


@dataclass(frozen=True)
class ConcurrencyPolicy:
    """At most `limit` calls at once among the processes of `scope`."""

    limit: int
    scope: LimitScope = LimitScope.PROCESS


@dataclass(frozen=True)
class CachePolicy:
    """`ttl` in seconds (None: for ever); `path` of an SQLite file that outlives the process (None: memory only)."""

    ttl: float | None = None
    max_entries: int = 10_000
    path: str | None = None


@dataclass(frozen=True)
class ReplayPolicy:
    """A file written by `record`."""

    path: str
    mode: ReplayMode = ReplayMode.STRICT


@dataclass(frozen=True)
class FaultPolicy:
    """Probabilities that a call times out, raises, or returns garbage."""

    timeout: float = 0.0
    error: float = 0.0
    garbage: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class CallPolicy:
    """Times in seconds.

    Attributes:
        timeout: for each call of each method.
        max_retries: retries of an `execute` after an infrastructure failure; the other methods are called once.
        retry_delay: before the first retry; doubled for each further one, at most 30 s.
        max_concurrent_calls, calls_per_second: of `execute`; the rate is this process's.
        max_arguments_chars, max_arguments_tokens: of the text that the model wrote as arguments.
        max_response_chars, max_response_tokens, tool_response_truncate_side: of the text that the model is shown. The
            tokenizer, and the side if None, come from the agent loop.
        cache, record, replay, faults: None where off; `record` is the file to append to.
    """

    timeout: float = 60.0
    max_retries: int = 0
    retry_delay: float = 0.5
    max_concurrent_calls: ConcurrencyPolicy | None = None
    calls_per_second: float | None = None
    max_arguments_chars: int = 200_000
    max_arguments_tokens: int | None = None
    max_response_chars: int = 1_000_000
    max_response_tokens: int | None = None
    tool_response_truncate_side: str | None = None
    on_exception: OnException = OnException.TELL
    cache: CachePolicy | None = None
    record: str | None = None
    replay: ReplayPolicy | None = None
    faults: FaultPolicy | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, object] | None, tool_name: str) -> CallPolicy:
        """The policy in a tool's `config`; a key that is absent or null has its default.

        Raises:
            ConfigError: a value is invalid; names tool and key.
        """
        read = _Reader(config or {}, f"tool '{tool_name}': config.")
        values: dict[str, Any] = {key: read.given(key, parse) for key, parse in _KEYS.items()}
        policy = cls(**{key: value for key, value in values.items() if value is not None})
        if policy.record is not None and policy.replay is not None:
            raise ConfigError(f"tool '{tool_name}': config.record and config.replay exclude each other")
        return policy


@dataclass(frozen=True)
class _Reader:
    """One section of a tool's `config`; `where` is the prefix of a key in messages."""

    section: Mapping[str, object]
    where: str

    def given(self, key: str, parse: Callable[[_Reader, str, Any], Any]) -> Any:
        """The parsed value of `key`, None where it is absent or null."""
        value = self.section.get(key)
        return None if value is None else parse(self, key, value)

    def wrong(self, key: str, wanted: str, hint: str = "") -> ConfigError:
        return ConfigError(f"{self.where}{key} must be {wanted}, not {self.section[key]!r}{hint}")

    def subsection(self, key: str, known: Sequence[str]) -> _Reader:
        value = self.section[key]
        if not isinstance(value, Mapping):
            raise self.wrong(key, f"a mapping of {', '.join(known)}")
        for name in value:
            if name not in known:
                raise ConfigError(f"{self.where}{key} has no '{name}'{did_you_mean(str(name), known)}")
        return _Reader(value, f"{self.where}{key}.")


def _number(
    types: type | tuple[type, ...], wanted: str, holds: Callable[[Any], bool]
) -> Callable[[_Reader, str, Any], Any]:
    """A reader of numbers of `types` for which `holds` is true; others are not what is `wanted`."""

    def read_number(read: _Reader, key: str, value: Any) -> Any:
        if not isinstance(value, types) or isinstance(value, bool) or not holds(value):
            raise read.wrong(key, wanted)
        return value

    return read_number


_positive = _number((int, float), "a positive number", lambda n: 0 < n < float("inf"))
_positive_int = _number(int, "a positive number without a fraction", lambda n: n >= 1)
_count = _number(int, "a number without a fraction, 0 or more", lambda n: n >= 0)
_integer = _number(int, "a number without a fraction", lambda n: True)
_delay = _number((int, float), "a number of seconds, 0 or more", lambda n: 0 <= n < float("inf"))
_probability = _number((int, float), "a probability (0 to 1)", lambda n: 0 <= n <= 1)
_limit = _number(int, "a positive number without a fraction, or a mapping of limit and scope", lambda n: n >= 1)


def _path(read: _Reader, key: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise read.wrong(key, "a path")
    return value


def _one_of(read: _Reader, key: str, value: Any, known: Sequence[str]) -> str:
    if value not in known:
        raise read.wrong(key, f"one of {', '.join(known)}", did_you_mean(str(value), known))
    return value


def _enum(kind: type[E]) -> Callable[[_Reader, str, Any], E]:
    return lambda read, key, value: kind(_one_of(read, key, value, [member.value for member in kind]))


def _concurrency(read: _Reader, key: str, value: Any) -> ConcurrencyPolicy:
    if not isinstance(value, Mapping):
        return ConcurrencyPolicy(_limit(read, key, value))
    read = read.subsection(key, ("limit", "scope"))
    limit = read.given("limit", _positive_int)
    if limit is None:
        raise ConfigError(f"{read.where}limit is missing: how many calls at once")
    return ConcurrencyPolicy(limit, read.given("scope", _enum(LimitScope)) or LimitScope.PROCESS)


def _cache(read: _Reader, key: str, value: Any) -> CachePolicy | None:
    read = read.subsection(key, ("enabled", "ttl", "max_entries", "path"))
    enabled = read.section.get("enabled", True)
    if not isinstance(enabled, bool):
        raise read.wrong("enabled", "true or false")
    entries = read.given("max_entries", _positive_int) or CachePolicy.max_entries
    policy = CachePolicy(read.given("ttl", _positive), entries, read.given("path", _path))
    return policy if enabled else None


def _replay(read: _Reader, key: str, value: Any) -> ReplayPolicy:
    if isinstance(value, str):
        return ReplayPolicy(_path(read, key, value))
    read = read.subsection(key, ("path", "mode"))
    path = read.given("path", _path)
    if path is None:
        raise ConfigError(f"{read.where}path is missing: the file that config.record wrote")
    return ReplayPolicy(path, read.given("mode", _enum(ReplayMode)) or ReplayMode.STRICT)


def _faults(read: _Reader, key: str, value: Any) -> FaultPolicy | None:
    read = read.subsection(key, [field.name for field in fields(FaultPolicy)])
    shares = {name: read.given(name, _probability) or 0.0 for name in ("timeout", "error", "garbage")}
    if sum(shares.values()) > 1:
        raise ConfigError(f"{read.where}timeout, error and garbage together must not exceed 1")
    policy = FaultPolicy(**shares, seed=read.given("seed", _integer) or 0)
    return policy if any(shares.values()) else None


_KEYS: dict[str, Callable[[_Reader, str, Any], Any]] = {
    "timeout": _positive,
    "max_retries": _count,
    "retry_delay": _delay,
    "max_concurrent_calls": _concurrency,
    "calls_per_second": _positive,
    "max_arguments_chars": _positive_int,
    "max_arguments_tokens": _positive_int,
    "max_response_chars": _positive_int,
    "max_response_tokens": _positive_int,
    "tool_response_truncate_side": lambda read, key, value: _one_of(read, key, value, SIDES),
    "on_exception": _enum(OnException),
    "cache": _cache,
    "record": _path,
    "replay": _replay,
    "faults": _faults,
}

POLICY_KEYS = frozenset(_KEYS)
"""The keys of `config` that are not the tool's own."""
