"""`RolloutResult`: what came of one row.

Invariant: there is a trajectory, or a reason why there is none; a dropped row never carries one.
"""

from __future__ import annotations

from dataclasses import dataclass

from etude.trajectory import StopReason, Trajectory


@dataclass
class RolloutResult:
    """A row's trajectory, or why there is none. `attempts` counts runs, `failures` what infrastructure broke (runs, and
    scorings of a finished one), `cause` is the last of these failures in one line."""

    trajectory: Trajectory | None
    attempts: int = 1
    failures: int = 0
    dropped: StopReason | None = None
    cause: str = ""
