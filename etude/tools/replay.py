"""`Replay`: serves recorded results, so that a rollout runs without the service behind a tool.

Invariant: a result is served only if the recording determines it; if the recording has none, or several that differ,
`MissingCall` names the call. In strict mode the result does not depend on the order in which trajectories run.

Modes: `strict` looks a call up by its content (the row's `create_kwargs` and `execute_kwargs`, and the arguments). A call
recorded after the same preceding calls is preferred; otherwise all recorded results of the call must be equal. `order` looks
a call up by its number in the trajectory, whatever its arguments; the recorded trajectory is the one with the same request
id, or the first unclaimed one with the same `create_kwargs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from etude.errors import DataError
from etude.tools.options import ReplayPolicy
from etude.tools.outcome import ToolResult
from etude.tools.recording import RecordedInstance, read_recording
from etude.tools.wire import canonical, digest

Kwargs = Mapping[str, Any]

_MAX_SHOWN_CHARS = 200
_HINT = "record the run again, or set replay.mode to order"


class MissingCall(DataError):
    """The recording has no result for a call, or several that differ."""


class Replay:
    """The recording of one tool."""

    def __init__(self, policy: ReplayPolicy, tool: str) -> None:
        """Reads the file.

        Raises:
            DataError: the file cannot be read, or has no call of this tool.
        """
        self._where = f"tool '{tool}': {policy.path}"
        self._strict = policy.mode == "strict"
        instances = read_recording(policy.path, tool)
        if not instances:
            raise DataError(f"{self._where} holds no call of this tool")
        self._unclaimed = [instance for instance in instances if not instance.broken]
        # (digest of the call, digest of the calls before it) → result; the first one recorded is kept.
        self._answers: dict[str, dict[str, Any]] = defaultdict(dict)
        for each in instances if self._strict else ():
            self._index(each)

    def _index(self, instance: RecordedInstance) -> None:
        history, row = "", dict(instance.kwargs)
        self._answers[digest("create", row)].setdefault("", instance.initial_response)
        for call in instance.in_order():
            question = digest("call", row, dict(call.kwargs), dict(call.arguments))
            history = digest(history, question)
            self._answers[question].setdefault(history, call.answer)
        if instance.reward is not None:
            question = digest("calc_reward", row, dict(instance.reward_kwargs))
            self._answers[question].setdefault(history, instance.reward)

    def begin(self, trajectory: str, create_kwargs: Kwargs) -> ReplayedInstance:
        """Starts the replay of the tool in a trajectory.

        Raises:
            MissingCall: no such `create` was recorded.
        """
        if self._strict:
            return _StrictInstance(self, create_kwargs)
        wanted = canonical(dict(create_kwargs))
        alike = [each for each in self._unclaimed if each.trajectory == trajectory]
        alike += [each for each in self._unclaimed if canonical(dict(each.kwargs)) == wanted]
        if not alike:
            raise MissingCall(
                f"{self._where} holds no further trajectory with the create_kwargs {_shown(create_kwargs)}: "
                "record as many as are replayed"
            )
        self._unclaimed.remove(alike[0])
        return _OrderedInstance(alike[0], self._where)

    def find(self, what: str, asked: Kwargs, question: str, history: str) -> Any:
        """Returns the recorded result of the call with digest `question`: the one after the calls `history`, else the one
        that all recorded trajectories agree on.

        Raises:
            MissingCall: there is none, or they differ.
        """
        answers = self._answers.get(question)
        if answers is None:
            raise MissingCall(f"{self._where} holds no {what} with {_shown(asked)}: {_HINT}")
        first = next(iter(answers.values()))
        if history not in answers and not all(_equivalent(first, other) for other in answers.values()):
            raise MissingCall(
                f"{self._where} holds different answers to the {what} with {_shown(asked)}, and none that was given "
                f"after the same calls as now: {_HINT}"
            )
        return answers.get(history, first)


class _OrderedInstance:
    """One tool in one trajectory, replayed in `order` mode: results in the recorded order, whatever the arguments."""

    def __init__(self, recorded: RecordedInstance, where: str) -> None:
        self._recorded = recorded
        self._of = f"{where}: trajectory {recorded.trajectory}"
        self._calls = iter(recorded.in_order())
        self.initial_response = recorded.initial_response

    def execute(self, arguments: Kwargs, kwargs: Kwargs) -> ToolResult:
        """Returns the result of the next call, in the order in which the model wrote them; raises MissingCall if there is
        none."""
        call = next(self._calls, None)
        if call is None:
            raise MissingCall(f"{self._of} made {len(self._recorded.calls)} calls, no further one")
        return call.answer

    def calc_reward(self, kwargs: Kwargs) -> float:
        """Returns the final reward; raises MissingCall if none was recorded."""
        if self._recorded.reward is None:
            raise MissingCall(f"{self._of} was recorded without its reward")
        return self._recorded.reward


class _StrictInstance:
    """One tool in one trajectory, replayed in `strict` mode: results looked up by the call's content."""

    def __init__(self, replay: Replay, create_kwargs: Kwargs) -> None:
        self._replay, self._row, self._history = replay, dict(create_kwargs), ""
        self.initial_response = replay.find("create", create_kwargs, digest("create", self._row), "")

    def execute(self, arguments: Kwargs, kwargs: Kwargs) -> ToolResult:
        """Returns the result of the call; raises MissingCall as `Replay.find`."""
        question = digest("call", self._row, dict(kwargs), dict(arguments))
        self._history = digest(self._history, question)
        answer: ToolResult = self._replay.find("call", arguments, question, self._history)
        return answer

    def calc_reward(self, kwargs: Kwargs) -> float:
        """Returns the final reward after the calls so far; raises MissingCall as `Replay.find`."""
        question = digest("calc_reward", self._row, dict(kwargs))
        return float(self._replay.find("calc_reward", kwargs, question, self._history))


ReplayedInstance = _OrderedInstance | _StrictInstance


def _equivalent(one: object, other: object) -> bool:
    return (
        one.is_equivalent_to(other) if isinstance(one, ToolResult) and isinstance(other, ToolResult) else one == other
    )


def _shown(asked: Kwargs) -> str:
    text = canonical(dict(asked))
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
