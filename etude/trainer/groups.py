"""`open_groups`: the worker groups of a run.

Invariant: only this module knows which processes the roles run in; only plain options and batches cross into a group. Actor
and rollout share one model. With `trainer.backend=ray` all roles have as many ranks, which share the slots of one pool.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from etude.config.nodes import check_nodes
from etude.distributed import InProcessWorkerGroup, RayWorkerGroup, ResourcePool, Worker, WorkerGroup
from etude.distributed.cluster import connect, has_gpus
from etude.distributed.ray_store import RayStore
from etude.distributed.usage import Usage, join_usage, measure_usage
from etude.errors import ConfigError, WorkerLost
from etude.events import EventSink, RolloutProgress
from etude.options import RunOptions, SFTOptions, TrainOptions
from etude.options.distillation import SELF
from etude.workers import (
    ActorRolloutRefWorker,
    BatchWorker,
    CriticWorker,
    RewardWorker,
    RoleOptions,
    RolloutWorker,
    TeacherWorker,
)

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5  # between two progress reports
_LOOK_SECONDS = 2.0  # between two looks for nodes that come back


@dataclass(frozen=True)
class Groups:
    """The groups of one run. `actor` is the same group as `rollout` where they are colocated, and where nothing is trained;
    `reward` scores whole batches, unless `rollout` scores each trajectory as it ends; `teachers` are by folder or server
    address; `batches` runs the trainer's functions on batches.

    Where a policy is trained on Ray, batches stay in the object stores of the nodes that made them: the driver has a
    `BatchRef` of each, and `batches` is a process of its own on the driver's node.
    """

    rollout: WorkerGroup
    actor: WorkerGroup
    batches: WorkerGroup
    critic: WorkerGroup | None = None
    reward: WorkerGroup | None = None
    teachers: Mapping[str, WorkerGroup] = field(default_factory=dict)
    resources: ExitStack = field(default_factory=ExitStack, repr=False)

    def usage(self) -> Usage:
        """What the processes of the run take, the driver's included; without those of a group that was lost."""
        groups = {id(each): each for each in (self.rollout, self.actor, self.batches, self.critic, self.reward) if each}
        found = [measure_usage()]
        for group in (*groups.values(), *self.teachers.values()):
            with suppress(WorkerLost):
                found += group.usage()
        return join_usage(found)

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
            with suppress(WorkerLost):  # the call that it is the progress of says so
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
        self.resources.close()


def open_groups(
    options: RoleOptions,
    run: TrainOptions | SFTOptions | None = None,
    *,
    trains: bool = True,
    critic: bool = False,
    keeps_batches: bool = False,
    restarts: bool = False,
) -> Groups:
    """Starts the workers, which load no model yet, in this process or on the cluster that `run` names. `trains`, `critic`:
    whether there is an actor, a critic; `keeps_batches`: whether on Ray the driver has references to batches; `restarts`:
    whether nodes may be about to come back. If one cannot start, the others are closed.

    Raises:
        ConfigError: there is no such cluster, it lacks the resources, or its nodes lack something.
    """
    scores_batches = options.rollout.mode == "sync" and options.reward.enable
    teachers = dict.fromkeys(each for each in options.distillation.teachers.values() if trains and each != SELF)
    with ExitStack() as stack:
        start: Callable[[type[Worker], RoleOptions], WorkerGroup] = _in_process
        keeps_batches = keeps_batches and run is not None and run.trainer.backend == "ray"
        if run is not None and run.trainer.backend == "ray":
            roles = 1 + critic + scores_batches + len(teachers)
            options, start = _on_ray(options, run, roles, stack, run.ray.node_timeout if restarts else 0)

        def opened(worker: type[Worker], its_options: RoleOptions = options) -> WorkerGroup:
            group = start(worker, its_options)
            stack.callback(group.close)
            return group

        rollout = opened(ActorRolloutRefWorker if trains else RolloutWorker)
        found: dict[str, Any] = {
            "critic": opened(CriticWorker) if critic else None,
            "reward": opened(RewardWorker) if scores_batches else None,
            "teachers": {teacher: opened(TeacherWorker, replace(options, teacher=teacher)) for teacher in teachers},
        }
        batches = _batch_process(options, stack) if keeps_batches else _in_process(BatchWorker, options)
        stack.callback(batches.close)
        if keeps_batches:
            for group in (rollout, batches, found["critic"], found["reward"], *found["teachers"].values()):
                if group is not None:
                    group.store = RayStore()
        return Groups(rollout, actor=rollout, batches=batches, **found, resources=stack.pop_all())


def _in_process(worker: type[Worker], options: RoleOptions) -> WorkerGroup:
    return InProcessWorkerGroup(worker, 1, options)


def _batch_process(options: RoleOptions, stack: ExitStack) -> WorkerGroup:
    """On the driver's node, whose files it writes; it takes none of its CPUs."""
    import ray

    here = {f"node:{ray.util.get_node_ip_address()}": 0.001}  # Ray has one such resource per node
    pool = ResourcePool([1], each=here)
    stack.callback(pool.close)
    return RayWorkerGroup(BatchWorker, pool, replace(options, device="cpu"))


def _on_ray(
    options: RoleOptions, run: TrainOptions | SFTOptions, roles: int, stack: ExitStack, wait: float
) -> tuple[RoleOptions, Callable[[type[Worker], RoleOptions], WorkerGroup]]:
    """The options for the cluster's devices, and what starts a group on its slots; `stack` gives these back."""
    trainer, cluster = run.trainer, run.ray
    stack.callback(connect(cluster.address, cluster.init_kwargs, trainer.n_gpus_per_node * trainer.nnodes))
    if trainer.device == "auto" and has_gpus():
        options = replace(options, device="cuda")  # the driver's node need not have one
    pool = _place(trainer, options.device.startswith("cuda"), roles, wait)
    stack.callback(pool.close)

    def start(worker: type[Worker], its_options: RoleOptions) -> WorkerGroup:
        return RayWorkerGroup(worker, pool, its_options, call_seconds=cluster.call_timeout)

    check_nodes(run, pool.node_ids, pool.use_gpu)
    return options, start


def _place(trainer: RunOptions, use_gpu: bool, roles: int, wait: float) -> ResourcePool:
    """A pool on `nnodes` nodes, which may take `wait` seconds to appear, or else on as many as there are, `min_nnodes` at
    least."""
    end, most, least = time.monotonic() + wait, trainer.nnodes, trainer.min_nnodes or trainer.nnodes
    while True:
        waits = time.monotonic() < end
        refused: ConfigError | None = None
        for nodes in range(most, (most if waits else least) - 1, -1):
            pool = ResourcePool([trainer.n_gpus_per_node] * nodes, use_gpu=use_gpu, max_colocate_count=roles)
            try:
                pool.place()
            except ConfigError as error:
                refused = refused or error
                continue
            if nodes < most:
                logger.warning("%s; trainer.min_nnodes lets the run go on with %d", refused, nodes)
            return pool
        if not waits:
            asked = f"trainer.nnodes={most}, trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
            raise ConfigError(f"{asked}: {refused}") from refused
        time.sleep(_LOOK_SECONDS)
