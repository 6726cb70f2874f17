"""`RolloutResult`: what came of one row.

Invariant: there is a trajectory, or a reason why there is none; a dropped row carries no sequence of any kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.trajectory import StopReason, ToolCallRecord, Trajectory


@dataclass
class RolloutResult:
    """A row's trajectory, or why there is none.

    `earlier` holds, in time order, the sequences that the agent left behind where it rewrote its history; rewards,
    messages and stop reason are the trajectory's alone. `attempts` counts runs, `failures` what infrastructure broke
    (runs, and scorings of a finished one), `cause` is the last of these failures in one line, `broken_calls` are the tool
    calls that ended a run, whose trajectory is gone.
    """

    trajectory: Trajectory | None
    attempts: int = 1
    failures: int = 0
    dropped: StopReason | None = None
    cause: str = ""
    broken_calls: list[ToolCallRecord] = field(default_factory=list)
    earlier: list[Trajectory] = field(default_factory=list)

    def drop(self, reason: StopReason) -> None:
        """Takes away what was rolled out."""
        self.trajectory, self.earlier, self.dropped = None, [], reason
