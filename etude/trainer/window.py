"""`Window`: which prompts may begin to roll out, and which finished groups a step takes, where rollouts go on while the
policy learns.

A group that begins under version v (after v steps) may be trained by step v + 1 + max_staleness at the latest: that is its
deadline. A step takes the finished groups that began first, as soon as there are enough, unless a group still in flight
would then miss its deadline for want of places in the steps up to it: for that one it waits. So no group is ever thrown away
for being slow, which would train on short rollouts more often than on long ones; a slow group is only trained later, and at
its deadline the step waits for it.

A step's places are spoken for in the order of deadlines. If as many prompts were in flight as deadlines allow,
(max_staleness + 1) batches, every place would be, and each step would wait for exactly the batch that was planned for it. So
1 + ⌈max_staleness / 2⌉ batches are in flight: one half of the staleness keeps the engine busy, the other lets slow groups be
overtaken. With max_staleness=1 these are the two batches of one-step-off training.

Invariant: every group that was admitted is taken once, or is among `groups`. While steps take whole batches, none is taken
after its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class InFlight(Protocol):
    """A group as the window sees it: the last step that may train it, and whether it has finished."""

    deadline: int

    @property
    def finished(self) -> bool:
        """Whether its rollouts have ended and been scored."""


G = TypeVar("G", bound=InFlight)


class Window(Generic[G]):
    """`groups` are those that no step has taken yet, in the order in which they began."""

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        self._batch_size, self._max_staleness = batch_size, max_staleness
        self.groups: list[G] = []

    def room(self, version: int, total_steps: int) -> int:
        """How many prompts may begin under `version` of a run of `total_steps`."""
        batches = min(1 + -(-self._max_staleness // 2), total_steps - version)
        return max(batches * self._batch_size - len(self.groups), 0)

    def admit(self, group: G, version: int) -> None:
        """`group` begins to roll out under `version`."""
        group.deadline = version + 1 + self._max_staleness
        self.groups.append(group)

    def choose(self, step: int) -> list[G] | None:
        """The groups that `step` trains on, which leave the window: a whole batch, or all that there are; None: it must
        wait."""
        chosen = [group for group in self.groups if group.finished][: self._batch_size]
        if len(chosen) < min(self._batch_size, len(self.groups)) or self._misses_deadline(step, chosen):
            return None
        self.take(chosen)
        return chosen

    def take(self, groups: Sequence[G]) -> None:
        """`groups` leave the window."""
        taken = {id(group) for group in groups}
        self.groups = [group for group in self.groups if id(group) not in taken]

    def _misses_deadline(self, step: int, chosen: Sequence[G]) -> bool:
        """Whether an unfinished group would be left with fewer places until its deadline than groups that come before it."""
        taken, left = {id(group) for group in chosen}, 0
        for group in self.groups:
            if id(group) not in taken:
                left += 1
                if not group.finished and left > (group.deadline - step) * self._batch_size:
                    return True
        return False
