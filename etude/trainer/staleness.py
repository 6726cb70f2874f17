"""`Window`: in asynchronous training, which prompts may start rolling out, and which finished groups a step trains on.

A group that starts under version v (after v steps) may be trained on by step v + 1 + max_staleness at the latest: that is
its deadline. A step takes the finished groups that started first, as soon as there are enough. The exception: if taking them
would leave too few slots for an unfinished group to meet its deadline, the step waits for that group. So no group is ever
dropped for being slow, which would bias training towards short rollouts; a slow group is trained on later, and at its
deadline the step waits for it.

The slots of a step are reserved in the order of deadlines. With as many prompts in flight as deadlines allow, that is
(max_staleness + 1) batches, every slot would be reserved, and each step would wait for exactly the batch planned for it. So
1 + ⌈max_staleness / 2⌉ batches are in flight: one half of the staleness keeps the engine busy, the other lets fast groups
overtake slow ones. With max_staleness=1 these are the two batches of one-step-off training.

Invariant: every admitted group is either still in `groups` or was taken once. As long as steps take whole batches, no group
is taken after its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from etude.data.files import Row
from etude.protocol import DataProto
from etude.trainer.rollouts import Batch

Place: TypeAlias = tuple[int, int, Row]  # (batch number in the plan, index in that batch, row)


@dataclass
class Group:
    """A prompt in flight: its requests and their finished rollouts, by key (a uid). The first request is for the rollouts to
    train on, an optional second one for the greedy baseline. `deadline`: the last step that may train on it."""

    place: Place
    requests: dict[str, DataProto]
    rank: int
    deadline: int = 0
    rolled: dict[str, Batch] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether all requests have finished."""
        return len(self.rolled) == len(self.requests)


class Window:
    """`groups` holds the groups that no step has taken yet, in the order in which they started."""

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        self._batch_size, self._max_staleness = batch_size, max_staleness
        self.groups: list[Group] = []

    def room(self, version: int, total_steps: int) -> int:
        """Number of prompts that may start under `version`, in a run of `total_steps`."""
        batches = min(1 + -(-self._max_staleness // 2), total_steps - version)
        return max(batches * self._batch_size - len(self.groups), 0)

    def admit(self, group: Group, version: int) -> None:
        """Adds `group`, which starts rolling out under `version`, and sets its deadline."""
        group.deadline = version + 1 + self._max_staleness
        self.groups.append(group)

    def choose(self, step: int) -> list[Group] | None:
        """Takes the groups that `step` trains on: a whole batch, or all groups if there are fewer. None: the step must
        wait."""
        chosen = [group for group in self.groups if group.finished][: self._batch_size]
        if len(chosen) < min(self._batch_size, len(self.groups)) or self._misses_deadline(step, chosen):
            return None
        self.take(chosen)
        return chosen

    def take(self, groups: Sequence[Group]) -> None:
        """Removes `groups` from the window."""
        taken = {id(group) for group in groups}
        self.groups = [group for group in self.groups if id(group) not in taken]

    def _misses_deadline(self, step: int, chosen: Sequence[Group]) -> bool:
        """Whether an unfinished group would have too few slots left before its deadline, given the groups ahead of it."""
        taken, left = {id(group) for group in chosen}, 0
        for group in self.groups:
            if id(group) not in taken:
                left += 1
                if not group.finished and left > (group.deadline - step) * self._batch_size:
                    return True
        return False
