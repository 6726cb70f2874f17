"""`open_groups`: the worker groups of a run.

Invariant: this is the only place that knows in which processes the roles run; what crosses into a group are plain options
and batches. In this version all groups live in this process, and actor and rollout share one model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from etude.distributed import InProcessWorkerGroup, Worker, WorkerGroup
from etude.events import EventSink, RolloutProgress
from etude.workers import ActorRolloutRefWorker, CriticWorker, RewardWorker, RoleOptions, RolloutWorker

_POLL_SECONDS = 0.5  # between two looks at how far a rollout is


@dataclass(frozen=True)
class Groups:
    """The groups of one run. `actor` is the same group as `rollout` where they are colocated, and where nothing learns;
    `reward` scores whole batches, where `rollout` does not score each trajectory as it ends."""

    rollout: WorkerGroup
    actor: WorkerGroup
    critic: WorkerGroup | None = None
    reward: WorkerGroup | None = None

    def progress(self) -> tuple[int, int]:
        """Trajectories of the rollout under way that have ended, and all of them; any thread may ask."""
        ranks = [self.rollout.direct("progress", rank)() for rank in range(self.rollout.world_size)]
        return sum(done for done, _ in ranks), sum(total for _, total in ranks)

    @contextmanager
    def report_progress(self, emit: EventSink) -> Iterator[None]:
        """Emits `RolloutProgress` from a thread of its own as trajectories end, and at the end what it came to."""
        over, seen = threading.Event(), (0, 0)

        def report() -> None:
            nonlocal seen
            if (now := self.progress()) != seen:
                seen = now
                emit(RolloutProgress(*now))

        def poll() -> None:
            while not over.wait(_POLL_SECONDS):
                report()

        thread = threading.Thread(target=poll, name="etude-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            report()

    def close(self) -> None:
        """Ends the workers; what they hold, their models above all, is free again."""
        for group in {id(group): group for group in vars(self).values() if group is not None}.values():
            group.close()


def open_groups(options: RoleOptions, *, trains: bool = True, critic: bool = False) -> Groups:
    """Starts the workers, which load no model yet. `trains`: whether there is an actor; `critic`: whether there is one."""

    def start(worker: type[Worker]) -> WorkerGroup:
        return InProcessWorkerGroup(worker, 1, options)

    rollout = start(ActorRolloutRefWorker if trains else RolloutWorker)
    scores_batches = options.rollout.mode == "sync" and options.reward.enable
    return Groups(
        rollout,
        actor=rollout,
        critic=start(CriticWorker) if critic else None,
        reward=start(RewardWorker) if scores_batches else None,
    )
