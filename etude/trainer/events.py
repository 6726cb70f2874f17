"""Events that a run emits while it runs; a viewer consumes them.

Invariant: an event is plain, picklable data, so that it may come from another process, and emitting one never waits for its
consumer. To inspect a run afterwards, read the files in its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from etude.options import RunOptions


@dataclass(frozen=True)
class RunStarted:
    """A run begins after `step`, 0 unless it is resumed; `total_steps` is its last step's number, 0 for an evaluation."""

    title: str
    total_steps: int
    options: RunOptions
    validation: Literal["greedy", "sampled"] = "greedy"  # how validations decode; training always samples
    step: int = 0


@dataclass(frozen=True)
class RolloutProgress:
    """`done` of `total` trajectories of the current rollout have finished. `tokens`: sampled since the run began; 0 if the
    engine does not count them."""

    done: int
    total: int
    tokens: int = field(default=0, compare=False)


@dataclass(frozen=True)
class UpdateProgress:
    """`done` of the `total` micro-batches of the current mini-batch are learned from."""

    done: int
    total: int


@dataclass(frozen=True)
class StepFinished:
    """A step has finished, including its validation, if one was due; step 0 is the validation before training. `evidence`:
    what its rollouts say about the problems in its metrics (`etude.checks.step_warnings`)."""

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    evidence: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Notice:
    """One line of text, such as the checkpoint that the run resumed from, or why it stops."""

    text: str


@dataclass(frozen=True)
class RunEnded:
    """The run has ended, successfully or not; its files are written and closed."""


Event: TypeAlias = RunStarted | RolloutProgress | UpdateProgress | StepFinished | Notice | RunEnded
EventSink: TypeAlias = Callable[[Event], None]
"""May be called from any thread and never raises: watching a run must not change it."""


def ignore_event(event: Event) -> None:
    """The default sink: drops the event."""
