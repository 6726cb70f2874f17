"""`Recorder` and `Recording`: write and read the calls of a run as JSON lines.

Invariant: every line is one self-contained event of one tool in one trajectory; a recording can be written by many
processes at once, read meanwhile, joined with others by `cat`, and edited by hand. Calls that failed for infrastructure
reasons are written for human readers and skipped by `replay`.

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
from etude.tools.wire import canonical, response_from_json, response_to_json, result_from_json, result_to_json

Kwargs = Mapping[str, Any]

BROKEN = "infrastructure"
"""The `error` of an infrastructure failure."""


class Recorder:
    """Appends one tool's events to a file.

    Its methods raise ConfigError when the file or an answer (an image of an unknown kind) cannot be written: a
    recording must not lack a call.
    """

    def __init__(self, path: str, tool: str) -> None:
        self._lines = JsonLines(path)
        self._tool = tool

    def create(self, trajectory: str, kwargs: Kwargs, response: ToolResponse) -> None:
        """A `create` that succeeded."""
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
        """An `execute`; after an infrastructure failure, `answer` is None and `error` says why."""
        values: dict[str, Any] = {"turn": place.turn, "number": place.number, "arguments": _plain(arguments)}
        values["seconds"] = round(seconds, 6)
        if answer is None:
            values |= {"error": BROKEN, "cause": error}
        self._write("execute", place.trajectory, kwargs=kwargs, answer=answer, **values)

    def calc_reward(self, trajectory: str, kwargs: Kwargs, reward: float) -> None:
        """A `calc_reward` that succeeded."""
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
            said = result_to_json(answer) if answer is not None else {}
            said |= {"response": response_to_json(response)} if response is not None else {}
            line = {"tool": self._tool, "event": event, "trajectory": trajectory, "kwargs": _plain(kwargs)}
            self._lines.append(line | values | said)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"tool '{self._tool}': its answer cannot be recorded: {one_line(error)} (config.record)"
            ) from error


def _plain(kwargs: Kwargs) -> Any:
    """Round-trips the values through JSON, so that they compare equal in a replay."""
    return json.loads(canonical(dict(kwargs)))


@dataclass(frozen=True)
class RecordedCall:
    """An `execute` that was answered."""

    arguments: Kwargs
    kwargs: Kwargs
    answer: ToolResult


@dataclass
class RecordedInstance:
    """One tool in one trajectory; `reward` is None where the trajectory ended without one."""

    trajectory: str
    kwargs: Kwargs = field(default_factory=dict)
    greeting: ToolResponse = field(default_factory=ToolResponse)
    calls: dict[int, RecordedCall] = field(default_factory=dict)
    reward: float | None = None
    reward_kwargs: Kwargs = field(default_factory=dict)
    broken_calls: set[int] = field(default_factory=set)

    @property
    def broken(self) -> bool:
        """Whether a call failed for infrastructure reasons for good: no later attempt was answered either."""
        return not self.broken_calls <= self.calls.keys()

    def in_order(self) -> list[RecordedCall]:
        """The calls, as the model wrote them."""
        return [call for _, call in sorted(self.calls.items())]


def read_recording(path: str | Path, tool: str) -> list[RecordedInstance]:
    """The events of `tool` in the file, in the order in which its trajectories start.

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
            if line["event"] == "create" or trajectory not in latest:  # another run may have used the same name
                latest[trajectory] = RecordedInstance(trajectory)
                instances.append(latest[trajectory])
            _take(latest[trajectory], line)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise DataError(
                f"{path}: line {number} is not a recorded call: {type(error).__name__}: {one_line(error)}"
            ) from error
    return instances


def _take(instance: RecordedInstance, line: Mapping[str, Any]) -> None:
    kwargs = dict(line.get("kwargs") or {})
    match line["event"]:
        case "create":
            instance.kwargs, instance.greeting = kwargs, response_from_json(line.get("response") or {})
        case "execute" if line.get("error") == BROKEN:
            instance.broken_calls.add(int(line["number"]))
        case "execute":
            answer = result_from_json(line, Source.REPLAY)
            instance.calls[int(line["number"])] = RecordedCall(dict(line["arguments"]), kwargs, answer)
        case "calc_reward":
            instance.reward, instance.reward_kwargs = float(line["reward"]), kwargs
        case other:
            raise ValueError(f"unknown event {other!r}")
