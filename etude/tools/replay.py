"""`Replay`: serves recorded calls, so that a rollout runs without the service behind a tool.

Invariant: an answer is served only if the recording determines it; if it has none, or several that differ, `MissingCall`
reports what was asked. Which answer is served does not depend on the order in which trajectories run.

Modes: `strict` looks a call up by what was asked (the row's `create_kwargs` and `execute_kwargs`, and the arguments). One
with the same preceding calls is preferred; otherwise all recorded answers to it must be equal. `order` looks a call up by
its number in the trajectory, whatever was asked; the trajectory is the one with the same request id, or the first
unclaimed one recorded with the same `create_kwargs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar

from etude.errors import DataError
from etude.schemas import ToolResponse
from etude.tools.options import ReplayPolicy
from etude.tools.outcome import ToolResult
from etude.tools.recording import RecordedInstance, read_recording
from etude.tools.wire import canonical, digest

T = TypeVar("T")
Kwargs = Mapping[str, Any]

_MAX_SHOWN_CHARS = 200
_HINT = "record the run again, or set replay.mode to order"


class MissingCall(DataError):
    """The recording has no answer to what was asked, or more than one."""


class Replay:
    """The recording of one tool."""

    def __init__(self, policy: ReplayPolicy, tool: str) -> None:
        """Reads the file.

        Raises:
            DataError: it cannot be read, or has no call of this tool.
        """
        self._where = f"tool '{tool}': {policy.path}"
        instances = read_recording(policy.path, tool)
        if not instances:
            raise DataError(f"{self._where} holds no call of this tool")
        self._strict = _StrictIndex(instances) if policy.mode == "strict" else None
        self._unused = [instance for instance in instances if not instance.broken]

    def begin(self, trajectory: str, create_kwargs: Kwargs) -> ReplayedInstance:
        """The recorded `create` of the tool for a trajectory.

        Raises:
            MissingCall: no such `create` was recorded.
        """
        if self._strict is not None:
            return _StrictInstance(self._strict, create_kwargs, self._where)
        wanted = canonical(dict(create_kwargs))
        alike = [each for each in self._unused if each.trajectory == trajectory]
        alike += [each for each in self._unused if canonical(dict(each.kwargs)) == wanted]
        if not alike:
            raise MissingCall(
                f"{self._where} holds no further trajectory with the create_kwargs {_shown(create_kwargs)}: "
                "record as many as are replayed"
            )
        self._unused.remove(alike[0])
        return _OrderedInstance(alike[0], self._where)


class ReplayedInstance:
    """One tool in one replayed trajectory; its methods raise MissingCall."""

    greeting: ToolResponse

    def execute(self, arguments: Kwargs, kwargs: Kwargs) -> ToolResult:
        """The answer to the next call; ask for calls in the order in which the model wrote them."""
        raise NotImplementedError

    def calc_reward(self, kwargs: Kwargs) -> float:
        """The final reward."""
        raise NotImplementedError


class _OrderedInstance(ReplayedInstance):
    def __init__(self, recorded: RecordedInstance, where: str) -> None:
        self._recorded, self._where = recorded, where
        self._calls = iter(recorded.in_order())
        self.greeting = recorded.greeting

    def execute(self, arguments: Kwargs, kwargs: Kwargs) -> ToolResult:
        call = next(self._calls, None)
        if call is None:
            count = len(self._recorded.calls)
            raise MissingCall(
                f"{self._where}: trajectory {self._recorded.trajectory} made {count} calls, no further one"
            )
        return call.answer

    def calc_reward(self, kwargs: Kwargs) -> float:
        if self._recorded.reward is None:
            raise MissingCall(f"{self._where}: trajectory {self._recorded.trajectory} was recorded without its reward")
        return self._recorded.reward


class _StrictInstance(ReplayedInstance):
    def __init__(self, index: _StrictIndex, create_kwargs: Kwargs, where: str) -> None:
        self._index, self._where = index, where
        self._kwargs, self._history = dict(create_kwargs), ""
        self.greeting = self._found(index.greetings, digest(self._kwargs), "create", create_kwargs)

    def execute(self, arguments: Kwargs, kwargs: Kwargs) -> ToolResult:
        key = digest(self._kwargs, dict(kwargs), dict(arguments))
        self._history = digest(self._history, key)
        return self._found(self._index.answers, key, "call", arguments)

    def calc_reward(self, kwargs: Kwargs) -> float:
        return self._found(self._index.rewards, digest(self._kwargs, dict(kwargs)), "calc_reward", kwargs)

    def _found(self, index: Mapping[str, _Candidates[T]], key: str, what: str, asked: Kwargs) -> T:
        candidates = index.get(key)
        if candidates is None:
            raise MissingCall(f"{self._where} holds no {what} with {_shown(asked)}: {_HINT}")
        try:
            return candidates.after(self._history)
        except LookupError:
            raise MissingCall(
                f"{self._where} holds different answers to the {what} with {_shown(asked)}, and none that was given "
                f"after the same calls as now: {_HINT}"
            ) from None


class _Candidates(dict[str, T]):
    """The recorded answers to one question, keyed by the preceding history; the first one per history is kept."""

    def after(self, history: str) -> T:
        if history in self:
            return self[history]
        first, *others = self.values()
        if not all(_agree(first, other) for other in others):
            raise LookupError
        return first


class _StrictIndex:
    """The recording by question."""

    def __init__(self, instances: list[RecordedInstance]) -> None:
        self.greetings: dict[str, _Candidates[ToolResponse]] = defaultdict(_Candidates)
        self.answers: dict[str, _Candidates[ToolResult]] = defaultdict(_Candidates)
        self.rewards: dict[str, _Candidates[float]] = defaultdict(_Candidates)
        for instance in instances:
            history, row = "", dict(instance.kwargs)
            self.greetings[digest(row)].setdefault("", instance.greeting)
            for call in instance.in_order():
                key = digest(row, dict(call.kwargs), dict(call.arguments))
                history = digest(history, key)
                self.answers[key].setdefault(history, call.answer)
            if instance.reward is not None:
                self.rewards[digest(row, dict(instance.reward_kwargs))].setdefault(history, instance.reward)


def _agree(one: object, other: object) -> bool:
    return (
        one.is_equivalent_to(other) if isinstance(one, ToolResult) and isinstance(other, ToolResult) else one == other
    )


def _shown(asked: Kwargs) -> str:
    text = canonical(dict(asked))
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
