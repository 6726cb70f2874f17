"""`open_groups`: the worker groups of a run.

Invariant: only this module knows which processes the roles run in; only plain options and batches cross into a group. Actor
and rollout share one model, unless rollout is a separate group. With `trainer.backend=ray` all other roles have the same
number of ranks, which share the slots of one pool.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from etude.checks.nodes import check_nodes
from etude.distributed import InProcessWorkerGroup, RayWorkerGroup, ResourcePool, Worker, WorkerGroup
from etude.distributed.cluster import connect, has_gpus
from etude.distributed.dispatch import READS
from etude.distributed.plane import BatchRef, BlockStore, map_batches
from etude.distributed.queue_store import QueueStore
from etude.distributed.ray_store import RayStore
from etude.distributed.usage import Usage, join_usage, measure_usage
from etude.errors import ConfigError, WorkerLost
from etude.inference import StaleCheck
from etude.metrics import Metrics
from etude.options import Options, RolloutOptions, RunOptions, TrainOptions
from etude.options.distillation import SELF
from etude.trainer.events import EventSink, RolloutProgress, UpdateProgress
from etude.workers import (
    ActorRolloutRefWorker,
    CriticWorker,
    RewardWorker,
    RolloutWorker,
    TeacherWorker,
    TrainWorker,
    sync_weights,
)
from etude.workers.role import HERE, Placement, RoleWorker

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0  # interval of progress reports
_LOOK_SECONDS = 2.0  # interval of retries while nodes come back


@dataclass(frozen=True)
class WorkerGroups:
    """The worker groups of one run. `actor` is the same group as `rollout` if they are colocated, or if nothing is trained;
    `reward` scores whole batches (None if `rollout` scores each trajectory as it ends); `teachers` are keyed by folder or
    server address; `run` calls the trainer's functions on batches (`RoleWorker.run`).

    When a policy is trained on Ray, batches stay in the processes that created them: the driver holds a `BatchRef` of each.
    `run` then calls a function in a rank of the actor on the driver's node (it writes files there), or in a separate process
    if there is no such rank.
    """

    rollout: WorkerGroup
    actor: WorkerGroup
    run: Callable[..., Any]
    critic: WorkerGroup | None = None
    reward: WorkerGroup | None = None
    teachers: Mapping[str, WorkerGroup] = field(default_factory=dict)
    beside: WorkerGroup | None = None  # the group whose rank `run` calls
    probed: StaleCheck = field(default_factory=StaleCheck, repr=False)  # draws of a separate rollout group
    resources: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def trained(self) -> list[WorkerGroup]:
        """The groups with an optimizer: those that checkpoints save."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def usage(self) -> Usage:
        """Resource usage of the run's processes, driver included; lost groups are left out."""
        groups = (self.rollout, self.actor, self.critic, self.reward, self.beside, *self.teachers.values())
        found = [measure_usage()]
        for group in {id(each): each for each in groups if each}.values():
            with suppress(WorkerLost):
                found += group.usage()
        return join_usage(found)

    def progress(self) -> tuple[int, int, int]:
        """Returns (finished, total) trajectories of the current rollout, and the tokens sampled so far; thread-safe."""
        done, total, tokens = map(sum, zip(*self.rollout.progress()))
        return done, total, tokens

    def sync_weights(self, version: int) -> list[Metrics]:
        """Sends the actor's weights to the rollout workers as `version`."""
        if self.rollout is self.actor:
            return list(self.rollout.update_weights(version))
        return sync_weights(self.actor, self.rollout, version, self.probed)

    @contextmanager
    def report_progress(self, emit: EventSink) -> Iterator[None]:
        """Emits `RolloutProgress` from a background thread as tokens are sampled and trajectories end, `UpdateProgress` as
        micro-batches are done, and both once more at the end."""
        over, seen, learned = threading.Event(), (0, 0, 0), (0, 0)
        trains = hasattr(self.actor, "update_progress")

        def report() -> None:
            nonlocal seen, learned
            with suppress(WorkerLost):  # the rollout or the update itself raises it
                if trains and (done := min(self.actor.update_progress())) != learned:
                    learned = done
                    emit(UpdateProgress(*done))
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
        """Closes the groups if the block, which sets up a run on them, raises."""
        with ExitStack() as stack:
            stack.callback(self.close)
            yield
            stack.pop_all()

    def close(self) -> None:
        """Stops the workers and frees their resources, models included."""
        self.resources.close()


def open_groups(
    run: Options, placement: Placement, *, critic: bool = False, keeps_batches: bool = False, restarts: bool = False
) -> WorkerGroups:
    """Starts the workers of `run`, in this process or on the cluster that it names; they load no model yet. If one cannot
    start, the others are closed.

    Args:
        placement: whether there is an actor, and the device.
        critic: whether there is a critic.
        keeps_batches: whether, on Ray, the driver holds references to batches instead of batches.
        restarts: whether this is a restart: waits up to `ray.node_timeout` for nodes to come back.

    Raises:
        ConfigError: the cluster cannot be reached, it lacks resources, or its nodes do not meet the requirements.
    """
    options, trains, on_ray = run.for_workers(), placement.trains, run.trainer.backend == "ray"
    scores_batches = options.rollout.mode == "sync" and options.scores
    teachers = dict.fromkeys(each for each in options.distillation.teachers.values() if trains and each != SELF)
    with ExitStack() as stack:
        start: Callable[[type[Worker], Placement], WorkerGroup] = partial(_in_process, options)
        if on_ray:
            roles = 1 + critic + scores_batches + len(teachers)
            placement, start = _on_ray(run, options, placement, roles, stack, run.ray.node_timeout if restarts else 0)

        def open_group(worker: type[Worker], its_placement: Placement = placement) -> WorkerGroup:
            group = start(worker, its_placement)
            stack.callback(group.close)
            return group

        actor = open_group(TrainWorker) if trains and options.has_rollout_group else None
        rollout = open_group(ActorRolloutRefWorker if trains and actor is None else RolloutWorker)
        found: dict[str, Any] = {
            "critic": open_group(CriticWorker) if critic else None,
            "reward": open_group(RewardWorker) if scores_batches else None,
            "teachers": {
                teacher: open_group(TeacherWorker, replace(placement, teacher=teacher)) for teacher in teachers
            },
        }
        beside, rank = rollout, 0
        if keeps_batches and on_ray:
            store: BlockStore = RayStore()
            if run.ray.data_plane != "objects":
                store = QueueStore.start()
                stack.callback(store.close)
            beside, rank = _rank_on_driver_node(actor or rollout, options, stack)
            for group in (rollout, actor, beside, found["critic"], found["reward"], *found["teachers"].values()):
                if group is not None:
                    group.store = store
        elif isinstance(rollout, RayWorkerGroup):  # the driver holds the batches
            beside = _in_process(options, RoleWorker, placement)
        found |= {"run": _select_columns(beside.direct("run", rank)), "beside": beside}
        return WorkerGroups(rollout, actor=actor or rollout, **found, resources=stack.pop_all())


def _select_columns(run: Callable[..., Any]) -> Callable[..., Any]:
    """`RoleWorker.run` with references restricted to the columns that the function declares (`reads`)."""

    def run_function(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        names = getattr(function, READS, None)
        given = args if names is None else map_batches(args, BatchRef, lambda ref: ref.restrict(names))
        return run(function, *given, **options)

    return run_function


def _in_process(options: TrainOptions, worker: type[Worker], placement: Placement) -> WorkerGroup:
    return InProcessWorkerGroup(worker, 1, options, placement)


def _rank_on_driver_node(actor: WorkerGroup, options: TrainOptions, stack: ExitStack) -> tuple[WorkerGroup, int]:
    """Returns a rank on the driver's node: one of `actor` if there is one, else that of a separate group that reserves no
    CPU."""
    import ray

    assert isinstance(actor, RayWorkerGroup)
    node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
    here = [rank for rank, place in enumerate(actor.places) if place.node_id == node]
    if here:
        return actor, here[0]
    pool = ResourcePool([1], each={f"node:{address}": 0.001})  # Ray has one such resource per node
    stack.callback(pool.close)
    alone = RayWorkerGroup(RoleWorker, pool, options, HERE)
    stack.callback(alone.close)
    return alone, 0


def _on_ray(
    run: Options, options: TrainOptions, placement: Placement, roles: int, stack: ExitStack, wait: float
) -> tuple[Placement, Callable[[type[Worker], Placement], WorkerGroup]]:
    """Connects to the cluster and reserves its slots, which `stack` releases. Returns the placement on its devices, and a
    function that starts a group on the slots."""
    trainer, cluster = run.trainer, run.ray
    sections: dict[str, RunOptions | RolloutOptions] = {"trainer": trainer}
    if placement.trains and options.has_rollout_group:
        sections["actor_rollout_ref.rollout"] = options.rollout
    for key, own in sections.items():
        if (own.min_nnodes or 0) > own.nnodes:
            raise ConfigError(f"{key}.min_nnodes={own.min_nnodes} is above {key}.nnodes={own.nnodes}")
    sizes = {key: (own.nnodes, own.n_gpus_per_node or trainer.n_gpus_per_node) for key, own in sections.items()}
    cpus = sum(nodes * each for nodes, each in sizes.values())
    cpus += QueueStore.CPUS if cluster.data_plane == "transferqueue" else 0
    stack.callback(connect(cluster.address, cluster.init_kwargs, cpus))
    if placement.device.startswith("cuda") or (trainer.device == "auto" and has_gpus()):
        placement = replace(placement, device="cuda")  # a process's only one, even if the driver's node has none
    use_gpu, pools = placement.device.startswith("cuda"), list[ResourcePool]()
    for key, (nodes, each) in sizes.items():
        least = sections[key].min_nnodes or nodes
        pools.append(_place(key, each, (nodes, least), use_gpu, 1 if pools else roles, wait))
        stack.callback(pools[-1].close)
    check_nodes(run, sorted({node for pool in pools for node in pool.node_ids}), use_gpu)

    def start(worker: type[Worker], its_placement: Placement) -> WorkerGroup:
        pool = pools[-1] if worker is RolloutWorker else pools[0]
        return RayWorkerGroup(worker, pool, options, its_placement, call_seconds=cluster.call_timeout)

    return placement, start


def _place(key: str, each: int, nodes: tuple[int, int], use_gpu: bool, roles: int, wait: float) -> ResourcePool:
    """Reserves a pool of `each` slots per node on as many nodes as available; `nodes` is (max, min). Waits up to `wait`
    seconds for the maximum."""
    end, (most, least) = time.monotonic() + wait, nodes
    while True:
        waits = time.monotonic() < end
        refused: ConfigError | None = None
        for count in range(most, (most if waits else least) - 1, -1):
            pool = ResourcePool([each] * count, use_gpu=use_gpu, max_colocate_count=roles)
            try:
                pool.place()
            except ConfigError as error:
                refused = refused or error
                continue
            if count < most:
                logger.warning("%s; %s.min_nnodes lets the run go on with %d", refused, key, count)
            return pool
        if not waits:
            raise ConfigError(f"{key}.nnodes={most}, {key}.n_gpus_per_node={each}: {refused}") from refused
        time.sleep(_LOOK_SECONDS)
