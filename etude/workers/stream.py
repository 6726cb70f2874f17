"""`RolloutStream`: rolls out groups of rows in a worker's event loop while the caller does something else.

Invariant: groups start in the order of submission, with at most `max_concurrent_trajectories` in flight (a larger group runs
alone); each is collected once, or an error is raised instead. `drain` returns with no trajectory in flight.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.agents import AgentLoopManager, Sampling
from etude.rewards import usage
from etude.timeouts import GRACE_SECONDS, settle
from etude.trajectory import Rollout


@dataclass(frozen=True)
class Submission:
    """The rows of one group, to be rolled out with `AgentLoopManager.generate`; `key` names the group."""

    key: str
    rows: Sequence[dict[str, Any]]
    sampling: Sampling
    least_group: int


class RolloutStream:
    """`submit`, `collect` and `fail` may be called from any thread; everything else runs in `loop`."""

    def __init__(self, manager: AgentLoopManager, loop: asyncio.AbstractEventLoop) -> None:
        self._manager, self._loop = manager, loop
        self._slots = manager.context.options.max_concurrent_trajectories
        self._waiting: deque[Submission] = deque()
        self._running: dict[asyncio.Task[list[Rollout]], Submission] = {}
        self._paused = False
        self._changed = threading.Condition()
        self._finished: list[tuple[Submission, list[Rollout]]] = []
        self._error: BaseException | None = None
        self._used: Counter[str] = Counter()  # by judges, so far, and what `judged` has returned of it
        self._told: Counter[str] = Counter()

    def submit(self, group: Submission) -> None:
        """Queues `group`; it starts as soon as there is room for it."""
        self._loop.call_soon_threadsafe(self._add, group)

    def collect(self, seconds: float) -> list[tuple[Submission, list[Rollout]]]:
        """Returns the groups that have ended since the last call, and their rollouts; waits up to `seconds` for the first.

        Raises:
            Exception: a group failed for a reason that is not infrastructure.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._error, seconds)
            if self._error is not None:
                raise self._error
            finished, self._finished = self._finished, []
            return finished

    def judged(self) -> dict[str, float]:
        """What judges used since the last call, also for trajectories in flight."""
        used = self._used.copy()
        since, self._told = {name: float(used[name] - self._told[name]) for name in used}, used
        return since

    def fail(self, error: BaseException) -> None:
        """Makes `collect` raise `error`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    async def drain(self) -> None:
        """Stops starting groups until `resume`, and waits for the running ones."""
        self._paused = True
        if self._running:
            await asyncio.wait(self._running)

    def resume(self) -> None:
        """Starts groups again after `drain`."""
        self._paused = False
        self._start()

    async def close(self) -> None:
        """Cancels running groups, which releases their tools, and discards waiting ones."""
        self._waiting.clear()
        await settle(set(self._running), self._manager.clean_up_seconds + 2 * GRACE_SECONDS)

    def _add(self, group: Submission) -> None:
        self._waiting.append(group)
        self._start()

    def _start(self) -> None:
        while self._waiting and not self._paused:
            busy, group = sum(len(each.rows) for each in self._running.values()), self._waiting[0]
            if busy and busy + len(group.rows) > self._slots:
                return
            self._waiting.popleft()
            work = self._manager.generate(group.rows, group.sampling, least_group=group.least_group)
            with usage.counting(self._used):
                task = self._loop.create_task(work)
            self._running[task] = group
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[list[Rollout]]) -> None:
        group = self._running.pop(task)
        if task.cancelled():
            self.fail(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.fail(error)
        else:
            with self._changed:
                self._finished.append((group, task.result()))
                self._changed.notify_all()
        self._start()
