"""`Groups`: which rows of a batch still matter, when some of their prompt's other answers are lost.

Invariant: a group is given up once, when fewer than `least` of its rows can still survive; rows that are lost already are
never named. Ending what runs of the others is the manager's business.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence


class Groups:
    """Rows that share a `uid` are a group; an estimator learns nothing from fewer than `least` survivors of one."""

    def __init__(self, uids: Sequence[Hashable], least: int) -> None:
        self._uids, self._least = list(uids), least
        self._left: dict[Hashable, set[int]] = defaultdict(set)
        for row, uid in enumerate(self._uids):
            self._left[uid].add(row)

    def lost(self, row: int) -> set[int]:
        """Takes note of a lost row; returns the other rows of its group if that has now become useless."""
        left = self._left[self._uids[row]]
        could = len(left) >= self._least
        left.discard(row)
        return set(left) if could and len(left) < self._least else set()
