"""What a run reports while it goes on: the trainer emits these records, and a viewer shows them.

Invariant: an event is plain data and pickles, so that it may come from another process; whoever emits one neither waits
for nor learns of what becomes of it. What a run leaves for later stands in the files of its folder.
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
    """How many trajectories of the rollout under way have ended, of how many."""

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
    """One line for whoever watches: what the run goes on from, why it stops."""

    text: str


@dataclass(frozen=True)
class RunEnded:
    """The run is over, however it ended; its files are written and closed."""


Event: TypeAlias = RunStarted | RolloutProgress | StepFinished | Notice | RunEnded
EventSink: TypeAlias = Callable[[Event], None]
"""Takes events from any thread, and never raises: showing a run must not change it."""


def ignore_event(event: Event) -> None:
    """The sink of a run that nobody watches."""
