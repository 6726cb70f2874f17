"""`ToolResult` and `ToolOutcome`: a tool's answer to one call, the call's outcome, and the parsing of return values.

Invariant: the metrics of an outcome are small JSON values, and its `error` is one of the words of `ToolCallRecord`.
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
    """Where an answer came from."""

    TOOL = "tool"  # executed by this call
    CACHE = "cache"  # by an earlier call with the same arguments
    SHARED = "shared"  # by a concurrent call with the same arguments
    REPLAY = "replay"  # a recording
    FAULT = "fault"  # an injected fault


@dataclass(frozen=True)
class ToolResult:
    """The result of one `execute`; `error` is None, "tool" or "exception" (the response then tells the model)."""

    response: ToolResponse
    reward: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    source: Source = Source.TOOL

    def is_equivalent_to(self, other: ToolResult) -> bool:
        """Whether the two look the same to a trajectory; metrics may differ."""
        return (self.response, self.reward, self.error) == (other.response, other.reward, other.error)


@dataclass(frozen=True)
class ToolOutcome:
    """One call of assistant turn `turn`: `response` for the model, step `reward`, `seconds` that the trajectory waited.

    `error` is None, "tool", "exception", "unknown_tool", "malformed" or "invalid_arguments"; `retries` counts attempts
    before the last that infrastructure broke, `timeouts` those of them that took too long, and `blocked_loop` the times that
    the tool blocked the event loop.
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
        """The record in a trajectory: text only, `shown` if the model saw another text than the response's."""
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
    """A call that infrastructure failed for good: it ends the trajectory; `record` has what is known of it."""

    def __init__(self, message: str, record: ToolCallRecord) -> None:
        super().__init__(message)
        self.record = record


def read_response(value: object) -> ToolResponse:
    """A tool's response: a `ToolResponse`, a str, or None for an empty one.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(value, ToolResponse):
        return value
    if value is None:
        return ToolResponse()
    if isinstance(value, str):
        return ToolResponse(text=value)
    raise TypeError(f"the response must be a ToolResponse or a str, not {type(value).__name__}")


def read_execution(returned: object) -> tuple[ToolResponse, object, dict[str, Any]]:
    """(response, reward, metrics) as `execute` returned them; the reward is not checked here.

    Raises:
        TypeError: `returned` has another shape.
    """
    if not isinstance(returned, tuple) or len(returned) != 3:
        shape = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
        raise TypeError(f"execute must return (ToolResponse, reward, metrics), not {shape}")
    response, reward, metrics = returned
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"the metrics that execute returns must be a dict, not {type(metrics).__name__}")
    return read_response(response), reward, _small(metrics) if metrics else {}


def _small(metrics: Mapping[Any, Any]) -> dict[str, Any]:
    """At most `_MAX_METRICS` entries of JSON values: long text is cut, large or unknown values become their type's name."""
    small: dict[str, Any] = {}
    for key, value in metrics.items():
        if len(small) == _MAX_METRICS:
            break
        small[str(key)[:_MAX_METRIC_CHARS]] = _plain(value)
    return small


def _plain(value: Any, depth: int = 2) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:_MAX_METRIC_CHARS].encode("utf-8", "replace").decode("utf-8")
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return _plain(value.item(), 0)  # a numpy or torch scalar
    if depth and isinstance(value, list | tuple) and len(value) <= _MAX_METRICS:
        return [_plain(item, depth - 1) for item in value]
    if depth and isinstance(value, Mapping) and len(value) <= _MAX_METRICS:
        return {str(key)[:_MAX_METRIC_CHARS]: _plain(item, depth - 1) for key, item in value.items()}
    return f"<{type(value).__name__}>"


def read_creation(returned: object, given_id: str) -> tuple[str, ToolResponse]:
    """(instance id, initial response) as `create` returned them; a bare id or no id at all is accepted.

    Raises:
        TypeError: `returned` has another shape.
    """
    if isinstance(returned, str):
        return returned, ToolResponse()
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], str | None):
        return returned[0] or given_id, read_response(returned[1])
    raise TypeError(f"create must return (instance_id, ToolResponse), not {type(returned).__name__}")


def merge_responses(first: ToolResponse, second: ToolResponse) -> ToolResponse:
    """Merges both responses, their texts joined by a newline."""
    return ToolResponse(
        text="\n".join(text for text in (first.text, second.text) if text) or None,
        image=[*(first.image or []), *(second.image or [])] or None,
        video=[*(first.video or []), *(second.video or [])] or None,
    )
