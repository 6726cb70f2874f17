"""`ToolResult` and `ToolOutcome`: what a tool returned for a call, and the outcome of the call in its trajectory; parsing of
the return values of tools.

Invariant: the metrics of an outcome are small JSON values, and its `error` is one that `ToolCallRecord` lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from etude.errors import InfrastructureError
from etude.schemas import FunctionCall, ToolResponse
from etude.trajectory import ToolCallRecord

_MAX_METRICS = 64
_MAX_METRIC_CHARS = 1_000


class Source(str, Enum):
    """Where a result came from."""

    TOOL = "tool"  # executed by this call
    CACHE = "cache"  # executed by an earlier call with the same arguments
    SHARED = "shared"  # executed by a concurrent call with the same arguments
    REPLAY = "replay"  # read from a recording
    FAULT = "fault"  # injected by `config.faults`


@dataclass(frozen=True)
class ToolResult:
    """The result of one `execute`; `error` is None, "tool" or "exception" (the response then describes the error)."""

    response: ToolResponse
    reward: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    source: Source = Source.TOOL

    def is_equivalent_to(self, other: ToolResult) -> bool:
        """Whether response, reward and error are equal; metrics and source may differ."""
        return (self.response, self.reward, self.error) == (other.response, other.reward, other.error)


@dataclass(frozen=True)
class ToolOutcome:
    """The outcome of one call of assistant turn `turn`: `response` for the model, step `reward`, and the `seconds` that the
    trajectory waited for it.

    `error` is None, "tool", "exception", "unknown_tool", "malformed" or "invalid_arguments". `retries` counts the attempts
    that ended in an infrastructure failure before the last one, `timeouts` those of them that timed out, and
    `blocked_loop` how often the tool blocked the event loop.
    """

    call: FunctionCall
    turn: int
    response: ToolResponse
    reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    source: Source = Source.TOOL
    retries: int = 0
    timeouts: int = 0
    blocked_loop: int = 0

    def to_record(self, shown: str | None = None) -> ToolCallRecord:
        """Converts to the trajectory's record, text only; `shown` is the text that the model saw if it is not the
        response's."""
        return ToolCallRecord(
            turn=self.turn,
            name=self.call.name,
            arguments=self.call.arguments,
            response=(self.response.text or "") if shown is None else shown,
            reward=self.reward,
            seconds=self.seconds,
            error=self.error,
            metrics=dict(self.metrics),
            source=self.source.value,
            retries=self.retries,
            timeouts=self.timeouts,
            blocked_loop=self.blocked_loop,
        )


class BrokenCall(InfrastructureError):
    """An infrastructure failure of a call after its last retry, which ends the trajectory; `record` describes the call."""

    def __init__(self, message: str, record: ToolCallRecord) -> None:
        super().__init__(message)
        self.record = record


def read_response(value: object) -> ToolResponse:
    """Converts a tool's response: a `ToolResponse`, a str, or None for an empty one.

    Raises:
        TypeError: `value` is of another type.
    """
    if isinstance(value, ToolResponse):
        return value
    if value is None:
        return ToolResponse()
    if isinstance(value, str):
        return ToolResponse(text=value)
    raise TypeError(f"the response must be a ToolResponse or a str, not {type(value).__name__}")


def read_execution(returned: object) -> tuple[ToolResponse, object, dict[str, Any]]:
    """Parses the return value of `execute` into (response, reward, metrics); the reward is not checked here.

    Raises:
        TypeError: `returned` is not such a tuple.
    """
    if not isinstance(returned, tuple) or len(returned) != 3:
        shape = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
        raise TypeError(f"execute must return (ToolResponse, reward, metrics), not {shape}")
    response, reward, metrics = returned
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"the metrics that execute returns must be a dict, not {type(metrics).__name__}")
    return read_response(response), reward, small_metrics(metrics) if metrics else {}


def small_metrics(metrics: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns up to `_MAX_METRICS` entries as JSON values: long text is truncated, large or unknown values become their
    type's name."""
    small: dict[str, Any] = {}
    for key, value in metrics.items():
        if len(small) == _MAX_METRICS:
            break
        small[str(key)[:_MAX_METRIC_CHARS]] = _plain_value(value)
    return small


def _plain_value(value: Any, depth: int = 2) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:_MAX_METRIC_CHARS].encode("utf-8", "replace").decode("utf-8")
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return _plain_value(value.item(), 0)  # a numpy or torch scalar
    if depth and isinstance(value, list | tuple) and len(value) <= _MAX_METRICS:
        return [_plain_value(item, depth - 1) for item in value]
    if depth and isinstance(value, Mapping) and len(value) <= _MAX_METRICS:
        return {str(key)[:_MAX_METRIC_CHARS]: _plain_value(item, depth - 1) for key, item in value.items()}
    return f"<{type(value).__name__}>"


def read_creation(returned: object, given_id: str) -> tuple[str, ToolResponse]:
    """Parses the return value of `create` into (instance id, initial response); accepts a bare id, or None as the id, which
    stands for `given_id`.

    Raises:
        TypeError: `returned` is neither an id nor such a tuple.
    """
    if isinstance(returned, str):
        return returned, ToolResponse()
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], str | None):
        return returned[0] or given_id, read_response(returned[1])
    raise TypeError(f"create must return (instance_id, ToolResponse), not {type(returned).__name__}")


def merge_responses(first: ToolResponse, second: ToolResponse) -> ToolResponse:
    """Concatenates both responses; their texts are joined by a newline."""
    return ToolResponse(
        text="\n".join(text for text in (first.text, second.text) if text) or None,
        image=[*(first.image or []), *(second.image or [])] or None,
        video=[*(first.video or []), *(second.video or [])] or None,
    )
