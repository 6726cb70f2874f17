"""The keys of a tool's `config` as frozen, validated data: `CallPolicy` has those of every tool, subclasses of `ToolOptions`
those of one tool.

Invariant: an invalid value stops the run at its start with one line that names tool and key; a key that is absent or null
has its default. Every tool has a time limit and a text limit, whether its `config` sets them or not. Applying the policy is
left to `ToolRuntime` and the session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    field_validator,
    model_validator,
)

from etude.errors import ConfigError
from etude.options.types import Count, Flag, Natural, NonNegative, Positive, Share, Text, describe_misfit, format_value
from etude.registry import did_you_mean

Side = Literal["left", "middle", "right"]


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an address such as https://host/path")
    return url


HttpUrl = Annotated[str, AfterValidator(_check_url)]


class ToolOptions(BaseModel):
    """Base of a section of `config`; the types of `etude.options.types` say in words what a key takes. The value of a field
    with `repr=False`, which may be a secret, is in no message."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, Mapping) else values


Options = TypeVar("Options", bound=ToolOptions)


class ConcurrencyPolicy(ToolOptions):
    """At most `limit` calls at once among the processes of `scope`: this one, or all of the Ray cluster."""

    limit: Count
    scope: Literal["process", "cluster"] = "process"


class CachePolicy(ToolOptions):
    """`ttl` in seconds (None: for ever); `path` of an SQLite file that outlives the process (None: memory only). `only`: the
    file answers in place of the tool."""

    enabled: Flag = True
    ttl: Positive | None = None
    max_entries: Count = 10_000
    path: Text | None = None
    only: Flag = False

    @model_validator(mode="after")
    def _has_a_file(self) -> CachePolicy:
        if self.only and self.path is None:
            raise ValueError("only needs a path: a file that a cache or a recording has filled")
        return self


class ReplayPolicy(ToolOptions):
    """The same as `cache: {path, only: true}`; a call is looked up by what is asked (`strict`), or by its place in the
    trajectory (`order`)."""

    path: Text
    mode: Literal["strict", "order"] = "strict"


class FaultPolicy(ToolOptions):
    """Probabilities that a call times out, raises, or returns garbage."""

    timeout: Share = 0.0
    error: Share = 0.0
    garbage: Share = 0.0
    seed: int = 0

    @model_validator(mode="after")
    def _is_possible(self) -> FaultPolicy:
        if self.timeout + self.error + self.garbage > 1:
            raise ValueError("timeout, error and garbage together must not exceed 1")
        return self


def _short_for(key: str) -> BeforeValidator:
    """Accepts a bare value as shorthand for a section with only `key`."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str | int | float) else value)


class CallPolicy(ToolOptions):
    """Times in seconds.

    Attributes:
        timeout: for each call of each method.
        max_retries: retries of an `execute` after an infrastructure failure; the other methods are called once.
        retry_delay: before the first retry; doubled for each further one, at most 30 s.
        max_concurrent_calls, calls_per_second: of `execute`; the rate is this process's.
        max_arguments_chars, max_arguments_tokens: of the text that the model wrote as arguments.
        max_response_chars, max_response_tokens, tool_response_truncate_side: of the text that the model is shown. The
            tokenizer, and the side if None, come from the agent loop.
        on_exception: of an exception that is neither a `ToolError` nor an infrastructure failure: the model is told, the
            trajectory is retried from fresh state, or the run ends.
        cache, record, replay, faults: None where off; `record` is the cache file to add every call to.
    """

    timeout: Positive = 60.0
    max_retries: Natural = 0
    retry_delay: NonNegative = 0.5
    max_concurrent_calls: Annotated[ConcurrencyPolicy, _short_for("limit")] | None = None
    calls_per_second: Positive | None = None
    max_arguments_chars: Count = 200_000
    max_arguments_tokens: Count | None = None
    max_response_chars: Count = 1_000_000
    max_response_tokens: Count | None = None
    tool_response_truncate_side: Side | None = None
    on_exception: Literal["tell", "infrastructure", "stop"] = "tell"
    cache: CachePolicy | None = None
    record: Text | None = None
    replay: Annotated[ReplayPolicy, _short_for("path")] | None = None
    faults: FaultPolicy | None = None

    @field_validator("cache")
    @classmethod
    def _is_on(cls, cache: CachePolicy | None) -> CachePolicy | None:
        return cache if cache is not None and cache.enabled else None

    @field_validator("faults")
    @classmethod
    def _can_happen(cls, faults: FaultPolicy | None) -> FaultPolicy | None:
        return faults if faults is not None and faults.timeout + faults.error + faults.garbage else None

    @model_validator(mode="after")
    def _records_or_replays(self) -> CallPolicy:
        if self.record is not None and self.served is not None:
            raise ValueError("record and replay exclude each other")
        return self

    @property
    def served(self) -> ReplayPolicy | None:
        """The file that answers in place of the tool."""
        if self.cache is not None and self.cache.only and self.cache.path is not None:
            return ReplayPolicy(path=self.cache.path)
        return self.replay

    @classmethod
    def from_config(cls, config: Mapping[str, object] | None, tool_name: str) -> CallPolicy:
        """Reads the call policy from a tool's `config`.

        Raises:
            ConfigError: a value is invalid; names tool and key.
        """
        own = {key: value for key, value in (config or {}).items() if key in POLICY_KEYS}
        return read_section(cls, own, f"tool '{tool_name}'", "config.")


POLICY_KEYS = frozenset(CallPolicy.model_fields)
"""The keys of `config` that every tool has."""


def read_options(kind: type[Options], config: Mapping[str, Any], tool_name: str) -> Options:
    """Reads the tool's own options from `config`.

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid; names tool and key.
    """
    own = {key: value for key, value in config.items() if key not in POLICY_KEYS and key != "type"}
    return read_section(kind, own, f"tool '{tool_name}'", "config.", POLICY_KEYS)


def read_section(
    kind: type[Options], section: Mapping[str, Any], where: str, prefix: str = "", others: frozenset[str] = frozenset()
) -> Options:
    """Validates `section` as a `kind`. Error messages prepend `prefix` to its keys, and suggest the keys of `others` too.

    Raises:
        ConfigError: as `read_options`; begins with `where`.
    """
    try:
        return kind.model_validate(section)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        first = min(found, key=lambda each: each["type"] != "extra_forbidden")  # often a typo of a missing key
        raise ConfigError(f"{where}: {_sentence(kind, first, prefix, others)}") from error


def _sentence(kind: type[BaseModel], error: Mapping[str, Any], prefix: str, others: frozenset[str]) -> str:
    """Describes a validation error in one line."""
    hint: Any = kind
    place, secret = prefix.removesuffix("."), False
    path = [str(part) for part in error["loc"]]
    for part in path:
        inner = next((each for each in (hint, *get_args(hint)) if _is_section(each)), None)
        inner = inner or next((each for arg in get_args(hint) for each in get_args(arg) if _is_section(each)), None)
        if inner is None:  # an entry of a list or a mapping: the key's own message covers it
            break
        if part not in inner.model_fields:
            return f"unknown key {prefix}{part}{did_you_mean(part, [*inner.model_fields, *others])}"
        place, prefix, others, field = f"{prefix}{part}", f"{prefix}{part}.", frozenset(), inner.model_fields[part]
        secret = secret or not field.repr
        hint = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    if error["type"] == "missing":
        return f"{place} is missing"
    if error["type"] == "value_error" and (reason := error["msg"].removeprefix("Value error, ")).strip():
        return f"{place}: {reason}" if place else reason
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"{place} must be a section of key: value, got {format_value(error['input'])}"
    told = describe_misfit(place, hint, error["input"])
    return told.rpartition(", got ")[0] if secret else told


def _is_section(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)
