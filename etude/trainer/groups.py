"""`open_groups`: the worker groups of a run.

Invariant: only this module knows which processes the roles run in; only plain options and batches cross into a group. In
this version all groups live in this process, and actor and rollout share one model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from etude.distributed import InProcessWorkerGroup, Worker, WorkerGroup
from etude.events import EventSink, RolloutProgress
from etude.options.distillation import SELF
from etude.workers import ActorRolloutRefWorker, CriticWorker, RewardWorker, RoleOptions, RolloutWorker, TeacherWorker

_POLL_SECONDS = 0.5  # between two progress reports


@dataclass(frozen=True)
class Groups:
    """The groups of one run. `actor` is the same group as `rollout` where they are colocated, and where nothing is trained;
    `reward` scores whole batches, unless `rollout` scores each trajectory as it ends; `teachers` are by folder or server
    address."""

    rollout: WorkerGroup
    actor: WorkerGroup
    critic: WorkerGroup | None = None
    reward: WorkerGroup | None = None
    teachers: Mapping[str, WorkerGroup] = field(default_factory=dict)

    def progress(self) -> tuple[int, int]:
        """(finished, total) trajectories of the current rollout; thread-safe."""
        ranks = [self.rollout.direct("progress", rank)() for rank in range(self.rollout.world_size)]
        return sum(done for done, _ in ranks), sum(total for _, total in ranks)

    @contextmanager
    def report_progress(self, emit: EventSink) -> Iterator[None]:
        """Emits `RolloutProgress` from its own thread as trajectories end, and once more at the end."""
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

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Closes the groups if the block raises: for what sets up a run on them."""
        with ExitStack() as stack:
            stack.callback(self.close)
            yield
            stack.pop_all()

    def close(self) -> None:
        """Ends the workers and frees what they hold, models included."""
        groups = [self.rollout, self.actor, self.critic, self.reward, *self.teachers.values()]
        for group in {id(group): group for group in groups if group is not None}.values():
            group.close()


def open_groups(options: RoleOptions, *, trains: bool = True, critic: bool = False) -> Groups:
    """Starts the workers, which load no model yet. `trains`, `critic`: whether there is an actor, a critic. If one cannot
    start, the others are closed."""
    with ExitStack() as stack:

        def start(worker: type[Worker], its_options: RoleOptions = options) -> WorkerGroup:
            group = InProcessWorkerGroup(worker, 1, its_options)
            stack.callback(group.close)
            return group

        rollout = start(ActorRolloutRefWorker if trains else RolloutWorker)
        teachers = dict.fromkeys(each for each in options.distillation.teachers.values() if trains and each != SELF)
        scores_batches = options.rollout.mode == "sync" and options.reward.enable
        groups = Groups(
            rollout,
            actor=rollout,
            critic=start(CriticWorker) if critic else None,
            reward=start(RewardWorker) if scores_batches else None,
            teachers={teacher: start(TeacherWorker, replace(options, teacher=teacher)) for teacher in teachers},
        )
        stack.pop_all()
    return groups
