"""`ToolCall`: a tool call of a trajectory, from the parser's `FunctionCall` to the answer; `ToolResult`: of one `execute`.

Invariant: a `ToolCall` is filled in by its `ToolSession` (and by a loop that overrides `_call_tool`); the loop then adds
what the model is shown. Its metrics are small JSON values, and its `error` is one that `ToolCallRecord` lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from etude.errors import InfrastructureError
from etude.schemas import FunctionCall, ToolResponse
from etude.seeds import chance
from etude.trajectory import ToolCallRecord


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


@dataclass(eq=False, slots=True)
class ToolCall:
    """One call of assistant turn `turn`.

    Attributes:
        requested: name and arguments as the model wrote them.
        trajectory, number: the trajectory's request id, and how many calls of this tool precede it there.
        parameters: the validated arguments.
        create_kwargs, execute_kwargs: the row's, for the tool.
        history: digest of the tool's calls so far, this one included; only kept for recordings.
        response: for the model; `reward`: of this step; `metrics`: the tool's own; `source`: where these came from.
        error: as in `ToolCallRecord`.
        seconds: how long the trajectory waited for it.
        retries: attempts that ended in an infrastructure failure before the last one; `timeouts`: those that timed out.
        blocked_loop: how often the tool blocked the event loop.
        shown: the text of the message that answers it, None until there is one; `images` and `image_tokens` are that
            message's decoded images, and the number of tokens of each; `cut`: `shown` was shortened to the room left.
    """

    requested: FunctionCall
    turn: int
    trajectory: str = ""
    number: int = 0
    parameters: dict[str, Any] = field(default_factory=dict)
    create_kwargs: Mapping[str, Any] = field(default_factory=dict)
    execute_kwargs: Mapping[str, Any] = field(default_factory=dict)
    history: str = ""
    response: ToolResponse = field(default_factory=ToolResponse)
    reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    source: Source = Source.TOOL
    seconds: float = 0.0
    retries: int = 0
    timeouts: int = 0
    blocked_loop: int = 0
    shown: str | None = None
    cut: bool = False
    images: Sequence[Any] = ()
    image_tokens: Sequence[int] = ()

    def chance(self, *salt: object) -> float:
        """Returns a pseudo-random number in [0, 1), determined by the call's place in its trajectory and `salt`."""
        return chance("\0".join(map(str, (*salt, self.requested.name, self.trajectory, self.turn, self.number))))

    def to_record(self) -> ToolCallRecord:
        """Converts to the trajectory's record, text only: that which the model saw, or the response's. What is wrong with a
        call that no tool got is whole, also where the model saw it cut for want of room."""
        shown = None if self.error in _UNANSWERED else self.shown
        return ToolCallRecord(
            turn=self.turn,
            name=self.requested.name,
            arguments=self.requested.arguments,
            response=(self.response.text or "") if shown is None else shown,
            reward=self.reward,
            seconds=self.seconds,
            error=self.error,
            metrics=dict(self.metrics),
            source=self.source.value,
            retries=self.retries,
            timeouts=self.timeouts,
            blocked_loop=self.blocked_loop,
            cut=self.cut,
        )


_UNANSWERED = ("malformed", "unknown_tool", "invalid_arguments")


class BrokenCall(InfrastructureError):
    """An infrastructure failure of a call after its last retry, which ends the trajectory; `record` describes the call."""

    def __init__(self, message: str, record: ToolCallRecord) -> None:
        super().__init__(message)
        self.record = record
