"""The quickstart's task: arithmetic that a tiny model cannot do in its head, and demonstrations of mostly bad habits.

Invariant: everything follows from the seed, and no two tables share a question.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.data.prepare.arithmetic import Habits, make_demonstrations, make_rows

# Shares of demonstrations that (use the tool well, copy its result wrongly), for the first and the second half. The first
# half teaches copying numbers into a call and out of its result, which takes a small model many examples; the second mostly
# answers without the tool, the habit that the model ends up with. Overall, most demonstrations guess.
_HABITS = ((0.62, 0.02), (0.30, 0.02))


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Makes tasks and demonstrations."""
    early, late = (
        make_demonstrations(rows.demonstrations // 2, 2 * seed + half, Habits(*shares))
        for half, shares in enumerate(_HABITS)
    )
    tables = {split: make_rows(getattr(rows, split), seed, split) for split in ("train", "val", "test")}
    return {**tables, "demonstrations": [*early, *late]}
