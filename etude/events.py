"""Events that a run emits as it goes; a viewer consumes them.

Invariant: an event is plain data that pickles, so that it may come from another process, and emitting one never waits
for its consumer. What is read after the run is in the files of its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from etude.options import RunOptions


@dataclass(frozen=True)
class RunStarted:
    """A run begins; `total_steps` is the number of its last step, 0 for an evaluation, which has none."""

    title: str
    total_steps: int
    options: RunOptions
    validation: Literal["greedy", "sampled"] = "greedy"  # how validations sample; training always draws


@dataclass(frozen=True)
class RolloutProgress:
    """`done` of `total` trajectories of the current rollout have ended."""

    done: int
    total: int


@dataclass(frozen=True)
class StepFinished:
    """A step, and the validation that was due after it; step 0 is the validation before training."""

    step: int
    total_steps: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Notice:
    """One line of text: which checkpoint the run resumed from, why it stops."""

    text: str


@dataclass(frozen=True)
class RunEnded:
    """The run is over, successfully or not; its files are written and closed."""


Event: TypeAlias = RunStarted | RolloutProgress | StepFinished | Notice | RunEnded
EventSink: TypeAlias = Callable[[Event], None]
"""Is called from any thread and never raises: watching a run must not change it."""


def ignore_event(event: Event) -> None:
    """The default sink: drops the event."""
