"""`ToolOutcome`: what came of one tool call, and the reading of what a tool returned.

Invariant: the text of an outcome is bounded and encodable (no lone surrogates, which tokenizers refuse), and its
`error` is one of the words that `ToolCallRecord` knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.schemas import FunctionCall, ToolResponse
from etude.trajectory import ToolCallRecord

MAX_ARGUMENTS_CHARS = 1_000_000


@dataclass(frozen=True)
class ToolOutcome:
    """One call of assistant turn `turn`: `response` for the model, step `reward`, `seconds` inside the tool.

    `error` is None, "tool", "exception", "unknown_tool" or "malformed".
    """

    call: FunctionCall
    turn: int
    response: ToolResponse
    reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None

    def to_record(self) -> ToolCallRecord:
        """The form that a trajectory keeps: text only."""
        return ToolCallRecord(
            turn=self.turn,
            name=self.call.name,
            arguments=self.call.arguments,
            response=self.response.text or "",
            reward=self.reward,
            seconds=self.seconds,
            error=self.error,
            metrics=dict(self.metrics),
        )


def decode_arguments(text: str) -> dict[str, Any]:
    """The JSON object in `text`.

    Raises:
        ValueError: it is no JSON object, or is nested or sized beyond reason; the text is for the model.
    """
    if len(text) > MAX_ARGUMENTS_CHARS:
        raise ValueError(f"the arguments are longer than {MAX_ARGUMENTS_CHARS} characters")
    try:
        arguments = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("the arguments are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the arguments are not valid JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise ValueError('the arguments must be a JSON object such as {"name": "value"}')
    return arguments


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def read_response(value: object) -> ToolResponse:
    """A tool's response: a `ToolResponse`, plain text, or None for nothing.

    Raises:
        TypeError: it is something else.
    """
    if value is None:
        return ToolResponse()
    if isinstance(value, str):
        return ToolResponse(text=value)
    if isinstance(value, ToolResponse):
        return value
    raise TypeError(f"the response must be a ToolResponse or a str, not {type(value).__name__}")


def read_execution(returned: object) -> tuple[ToolResponse, object, dict[str, Any]]:
    """(response, reward, metrics) as `execute` returned them; the reward is not judged here.

    Raises:
        TypeError: `returned` has another shape.
    """
    if not isinstance(returned, tuple) or len(returned) != 3:
        shape = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
        raise TypeError(f"execute must return (ToolResponse, reward, metrics), not {shape}")
    response, reward, metrics = returned
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"the metrics that execute returns must be a dict, not {type(metrics).__name__}")
    return read_response(response), reward, dict(metrics or {})


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


def joined(first: ToolResponse, second: ToolResponse) -> ToolResponse:
    """Both responses as one, texts on lines of their own."""
    return ToolResponse(
        text="\n".join(text for text in (first.text, second.text) if text) or None,
        image=[*(first.image or []), *(second.image or [])] or None,
        video=[*(first.video or []), *(second.video or [])] or None,
    )


def bounded(response: ToolResponse, max_chars: int) -> ToolResponse:
    """`response` with at most `max_chars` characters of text, lone surrogates replaced by '?'."""
    if response.text is None:
        return response
    text = response.text[:max_chars].encode("utf-8", "replace").decode("utf-8")
    return response if text == response.text else response.model_copy(update={"text": text})
