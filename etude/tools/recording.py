"""`Recorder` and `read_recording`: write and read the tool calls of a run as JSON lines.

Invariant: every line is one self-contained event of one tool in one trajectory; a recording can be written by many
processes at once, read meanwhile, concatenated with others by `cat`, and edited by hand. Infrastructure failures are
written for human readers and skipped by `replay`.

    {"tool": "search", "event": "create", "trajectory": "0-0/0/0", "kwargs": {…}, "response": {"text": …}}
    {"tool": "search", "event": "execute", "trajectory": "0-0/0/0", "turn": 0, "number": 0, "kwargs": {…},
     "arguments": {…}, "response": {"text": …}, "reward": 0.0, "metrics": {…}, "error": …, "seconds": 0.12}
    {"tool": "search", "event": "calc_reward", "trajectory": "0-0/0/0", "kwargs": {…}, "reward": 1.0}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import ConfigError, DataError, one_line
from etude.jsonl import JsonLines, read_json_lines
from etude.schemas import ToolResponse
from etude.tools.faults import CallPlace
from etude.tools.outcome import Source, ToolResult
from etude.tools.wire import (
    canonical,
    response_from_json,
    response_to_json,
    result_from_json,
    result_to_json,
    reward_from_json,
)

Kwargs = Mapping[str, Any]

BROKEN = "infrastructure"
"""The `error` of an infrastructure failure."""


class Recorder:
    """Appends the events of one tool to a file.

    Its methods raise ConfigError if the file or a result (an image of an unknown type) cannot be written: a recording must
    not lack a call.
    """

    def __init__(self, path: str, tool: str) -> None:
        self._lines = JsonLines(path)
        self._tool = tool

    def create(self, trajectory: str, kwargs: Kwargs, response: ToolResponse) -> None:
        """Records a `create` that succeeded."""
        self._write("create", trajectory, kwargs=kwargs, response=response)

    def execute(
        self,
        place: CallPlace,
        kwargs: Kwargs,
        arguments: Kwargs,
        answer: ToolResult | None,
        seconds: float,
        error: str = "",
    ) -> None:
        """Records an `execute`; after an infrastructure failure, `answer` is None and `error` is the reason."""
        values: dict[str, Any] = {"turn": place.turn, "number": place.number, "arguments": _as_json(arguments)}
        values["seconds"] = round(seconds, 6)
        if answer is None:
            values |= {"error": BROKEN, "cause": error}
        self._write("execute", place.trajectory, kwargs=kwargs, answer=answer, **values)

    def calc_reward(self, trajectory: str, kwargs: Kwargs, reward: float) -> None:
        """Records a `calc_reward` that succeeded."""
        self._write("calc_reward", trajectory, kwargs=kwargs, reward=reward)

    def _write(
        self,
        event: str,
        trajectory: str,
        *,
        kwargs: Kwargs,
        response: ToolResponse | None = None,
        answer: ToolResult | None = None,
        **values: Any,
    ) -> None:
        try:
            result = result_to_json(answer) if answer is not None else {}
            result |= {"response": response_to_json(response)} if response is not None else {}
            line = {"tool": self._tool, "event": event, "trajectory": trajectory, "kwargs": _as_json(kwargs)}
            self._lines.append(line | values | result)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"tool '{self._tool}': its answer cannot be recorded: {one_line(error)} (config.record)"
            ) from error


def _as_json(kwargs: Kwargs) -> Any:
    """Round-trips the values through JSON, so that they compare equal in a replay."""
    return json.loads(canonical(dict(kwargs)))


@dataclass(frozen=True)
class RecordedCall:
    """A recorded `execute` with its result."""

    arguments: Kwargs
    kwargs: Kwargs
    answer: ToolResult


@dataclass
class RecordedInstance:
    """The recorded events of one tool in one trajectory; `reward` is None if the trajectory ended without one."""

    trajectory: str
    kwargs: Kwargs = field(default_factory=dict)
    initial_response: ToolResponse = field(default_factory=ToolResponse)
    calls: dict[int, RecordedCall] = field(default_factory=dict)
    reward: float | None = None
    reward_kwargs: Kwargs = field(default_factory=dict)
    broken_calls: set[int] = field(default_factory=set)

    @property
    def broken(self) -> bool:
        """Whether a call ended in an infrastructure failure, and no retry of it succeeded."""
        return not self.broken_calls <= self.calls.keys()

    def in_order(self) -> list[RecordedCall]:
        """Returns the calls in the order in which the model wrote them."""
        return [call for _, call in sorted(self.calls.items())]


def read_recording(path: str | Path, tool: str) -> list[RecordedInstance]:
    """Reads the events of `tool` from the file; one entry per trajectory, in the order in which they start.

    Raises:
        DataError: the file cannot be read, or a line is not an event; names file and line.
    """
    instances: list[RecordedInstance] = []
    latest: dict[str, RecordedInstance] = {}
    for number, line in read_json_lines(path):
        if line.get("tool") != tool:
            continue
        try:
            trajectory = str(line["trajectory"])
            if (
                line["event"] == "create" or trajectory not in latest
            ):  # a second `create`: another run used the same name
                latest[trajectory] = RecordedInstance(trajectory)
                instances.append(latest[trajectory])
            _add_event(latest[trajectory], line)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise DataError(
                f"{path}: line {number} is not a recorded call: {type(error).__name__}: {one_line(error)}"
            ) from error
    return instances


def _add_event(instance: RecordedInstance, line: Mapping[str, Any]) -> None:
    kwargs = dict(line.get("kwargs") or {})
    match line["event"]:
        case "create":
            instance.kwargs, instance.initial_response = kwargs, response_from_json(line.get("response") or {})
        case "execute" if line.get("error") == BROKEN:
            instance.broken_calls.add(int(line["number"]))
        case "execute":
            answer = result_from_json(line, Source.REPLAY)
            instance.calls[int(line["number"])] = RecordedCall(dict(line["arguments"]), kwargs, answer)
        case "calc_reward":
            instance.reward, instance.reward_kwargs = reward_from_json(line["reward"]), kwargs
        case other:
            raise ValueError(f"unknown event {other!r}")
