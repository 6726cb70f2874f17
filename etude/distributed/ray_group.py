"""`RayWorkerGroup`: a worker group whose ranks are processes of a Ray cluster, one actor each.

Invariant: every call ends. It has a deadline; a process that died or does not answer its pings raises a `WorkerLost` that
names role, rank, node and its last log lines; and when one rank fails, the others are interrupted and get a grace period.
After a loss, further calls fail immediately. A rank's own exception reaches the caller unchanged, as with in-process ranks.

Arguments that ranks share are put into the object store once. While a call runs, its ranks are pinged, and what they log at
WARNING and above is logged here, once for all ranks. Ray is imported when a group is created.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from etude.distributed.cluster import check_head
from etude.distributed.dispatch import Arguments, Dispatch, Registration
from etude.distributed.pool import ResourcePool
from etude.distributed.rank_process import LogRecord, ProcessOptions, ProcessPlace, RankProcess, Reply, unpack_error
from etude.distributed.ray_store import lend_batches, watch_blocks
from etude.distributed.worker import MeshPlace, Worker
from etude.distributed.worker_group import WorkerGroup, add_rank_note
from etude.errors import WorkerLost, one_line
from etude.limits.cluster import require_ray

CALL_SECONDS = 3600.0
SILENT_SECONDS = 120.0  # after which a process that answers no ping is lost; longer than any stall of a healthy one
_START_SECONDS = 600.0  # for a process to start: it imports torch, perhaps from a slow file system
_PING_SECONDS = 5.0
_SETTLE_SECONDS = 30.0  # grace period for the other ranks after one has failed, and for a worker to close
_LOG_SECONDS = 5.0  # for reading a log file on another node
_LOG_LINES, _LOG_CHARACTERS = 5, 600
_MAX_LOGGED = 1000  # max. records remembered as already logged for another rank
_RAY_MARKERS = (":job_id:", ":actor_name:", ":task_name:")  # marker lines that Ray writes into log files
_CONCURRENCY_GROUPS = {"control": 2, "direct": 8, "background": 1, "lend": 2}
"""Concurrency groups of an actor; its other calls run one after another in a separate thread."""


@dataclass(frozen=True)
class _Rank:
    """An actor, where it runs, and the keys of blocks that it no longer needs to keep."""

    rank: int
    actor: Any
    place: ProcessPlace
    unused: deque[str] = field(default_factory=deque)


class RayWorkerGroup(WorkerGroup):
    """`pool.world_size` ranks of `worker_cls` on the slots of `pool`; needs a connection to a cluster (`ray.init`).

    `args` and `kwargs` go to the constructor of every worker, together with `rank` and `world_size`; by then, each process
    has joined `torch.distributed` (gloo, and NCCL with GPUs) and has the environment variables that `worker.py` describes.
    The deadline of a call is `call_seconds`; a process is lost after `silent_seconds` without an answer to a ping.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: the cluster lacks the resources.
        WorkerLost: a process did not start.
        Exception: what a worker's constructor raised.
    """

    def __init__(
        self,
        worker_cls: type[Worker],
        pool: ResourcePool,
        *args: Any,
        call_seconds: float = CALL_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        **kwargs: Any,
    ) -> None:
        require_ray("RayWorkerGroup")
        import ray

        super().__init__(worker_cls, pool.world_size)
        self._ray, self._pool = ray, pool
        self._call_seconds, self._silent_seconds = call_seconds, silent_seconds
        self._ranks: list[_Rank] = []
        self._watches: set[_Watch] = set()
        self._lost: WorkerLost | None = None
        self._gone: set[int] = set()
        self._logged: dict[LogRecord, int] = {}  # record → the rank that logged it first
        self._guard = threading.Lock()
        try:
            self._start(args, kwargs)
        except BaseException:
            self.close()
            raise

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, pool = self._ray, self._pool
        slots, options = pool.place(), ProcessOptions.of_this_process()
        cls = ray.remote(concurrency_groups=_CONCURRENCY_GROUPS)(RankProcess)
        actors = [
            cls.options(
                num_cpus=pool.share * pool.resources.get("CPU", 0.0),
                num_gpus=pool.share * pool.resources.get("GPU", 0.0),
                resources={kind: pool.share * n for kind, n in pool.resources.items() if kind not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(slot.placement_group, slot.bundle),
            ).remote(options)
            for slot in slots
        ]
        unknown = ProcessPlace("", "unknown", "", 0, "")
        self._ranks = [_Rank(rank, actor, unknown) for rank, actor in enumerate(actors)]
        places = self._ask("start", [actor.place.remote() for actor in actors], seconds=_START_SECONDS, pings=False)
        self._ranks = [_Rank(rank, actor, place) for rank, (actor, place) in enumerate(zip(actors, places))]
        port = 0
        if self.world_size > 1:
            store = actors[0].open_store.remote(places[0].address, self.world_size, self._call_seconds)
            (port,) = self._ask("open_store", [store])
        given = ray.put((args, kwargs))
        device, refs = "cuda" if pool.use_gpu else None, []
        for rank, slot in zip(self._ranks, slots):
            environment = {
                "WORLD_SIZE": str(self.world_size),
                "RANK": str(rank.rank),
                "LOCAL_WORLD_SIZE": str(pool.process_on_nodes[slot.node]),
                "LOCAL_RANK": str(slot.local_rank),
                "MASTER_ADDR": places[0].address,
                "MASTER_PORT": str(port),
            }
            refs.append(rank.actor.build.remote(environment, self._call_seconds, device, self.worker_cls, given))
        for future in self._watch("__init__", refs, self._ranks):
            future.result()

    @property
    def places(self) -> list[ProcessPlace]:
        return [rank.place for rank in self._ranks]

    def direct(self, name: str, rank: int = 0) -> Callable[..., Any]:
        """See `WorkerGroup.direct`; an `async` method runs in the rank's process and can be awaited here."""
        call = super().direct(name, rank)
        if not inspect.iscoroutinefunction(getattr(self.worker_cls, name)):
            return call

        async def run(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.wrap_future(self._run(name, [(args, kwargs)], [[rank]])[0])

        return run

    def interrupt(self) -> None:
        """Asks the running calls to end early and waits for a grace period. A rank that does not end its call is not lost:
        it can still save in the background, and `close` kills it."""
        running, end = list(self._watches), time.monotonic() + _SETTLE_SECONDS
        for watch in running:
            watch.is_abandoned = True
        for rank in self._ranks:
            rank.actor.interrupt.options(concurrency_group="control").remote()
        for watch in running:
            watch.join(max(0.0, end - time.monotonic()))
            self._gone.update(watch.pending_ranks())

    def close(self) -> None:
        """Closes the workers, with a grace period, and kills their processes."""
        ranks, self._ranks = self._ranks, []
        self._lost = self._lost or WorkerLost(f"{self.worker_cls.__name__}: the group is closed")
        if not ranks or not self._ray.is_initialized():
            return
        closing = {rank.actor.close.remote(): rank.rank for rank in ranks if rank.rank not in self._gone}
        if closing:
            self._ray.wait(list(closing), num_returns=len(closing), timeout=_SETTLE_SECONDS)
        for ref, number in closing.items():
            with suppress(Exception):
                self._log(self._ray.get(ref, timeout=0).records, number)
        for rank in ranks:
            with suppress(Exception):
                self._ray.kill(rank.actor)

    # -- calls -----------------------------------------------------------------------------------------------------

    def _call(self, name: str, registration: Registration, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._call(name, registration, *args, **kwargs)
        except KeyboardInterrupt:
            self.interrupt()
            raise

    def _run(self, method_name: str, parts: Sequence[Arguments], ranks: Sequence[Sequence[int]]) -> list[Future[Any]]:
        known, refs, called, group = self._alive(), [], [], self._thread_of(method_name)
        for part, same in zip(parts, ranks, strict=True):
            shared = len(same) > 1
            given = lend_batches(part, None if shared else known[same[0]].actor)
            given = self._ray.put(given) if shared else given
            for rank in (known[number] for number in same):
                unused = take_all(rank.unused)
                refs.append(rank.actor.call.options(**group).remote(method_name, given, self.store, unused))
                called.append(rank)
        return self._watch(method_name, refs, called, keeping=parts)

    def _alive(self) -> list[_Rank]:
        """Returns the ranks, which another thread may close meanwhile; raises WorkerLost if the group is unusable."""
        ranks = self._ranks
        check_head()
        if self._lost is not None:
            raise self._lost
        return ranks

    def _thread_of(self, method_name: str) -> dict[str, str]:
        registration = self._methods[method_name]
        if registration.dispatch_mode is Dispatch.DIRECT_ROLLOUT_METHOD:
            return {"concurrency_group": "direct"}
        return {"concurrency_group": "background"} if registration.in_background else {}

    def _places(self, mesh: str) -> list[MeshPlace]:
        return self._ask("mesh_place", [rank.actor.mesh_place.remote(mesh) for rank in self._alive()])

    def _watch(
        self, method: str, refs: Sequence[Any], ranks: Sequence[_Rank], keeping: object = None
    ) -> list[Future[Any]]:
        watch = _Watch(self, method, refs, ranks, keeping=keeping)
        watch.start()
        return watch.futures

    def _ask(self, method: str, refs: Sequence[Any], **limits: Any) -> list[Any]:
        """Calls the rank processes themselves rather than their workers, and waits for the values."""
        watch = _Watch(self, method, refs, self._ranks[: len(refs)], **limits)
        watch.start()
        return [future.result() for future in watch.futures]

    # -- failures --------------------------------------------------------------------------------------------------

    def _lose(self, rank: _Rank, method: str, what: str) -> WorkerLost:
        """Marks a rank as lost, which makes the group unusable; returns the error."""
        lines = self._last_lines(rank.place)
        log_end = f"; its last lines: {lines}" if lines else ""
        role = self.worker_cls.__name__
        lost = WorkerLost(
            f"{role}, rank {rank.rank} of {self.world_size}, on {rank.place}: {what} in {method}{log_end}"
        )
        with self._guard:
            self._lost = self._lost or lost
            self._gone.add(rank.rank)
        return lost

    def _last_lines(self, place: ProcessPlace) -> str:
        """The last lines of the process's log, read on its node."""
        if not place.log:
            return ""
        if os.path.exists(place.log):  # never raises
            return read_end(place.log)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with suppress(Exception):  # the node may be gone
            on_node = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
            task = self._ray.remote(num_cpus=0)(read_end).options(scheduling_strategy=on_node)
            return str(self._ray.get(task.remote(place.log), timeout=_LOG_SECONDS))
        return ""

    def _log(self, records: Sequence[LogRecord], rank: int) -> None:
        """Logs a rank's records, unless another rank has logged the same."""
        for record in records:
            with self._guard:
                if self._logged.setdefault(record, rank) != rank:
                    continue
                if len(self._logged) > _MAX_LOGGED:
                    del self._logged[next(iter(self._logged))]
            name, level, text = record
            where = f"rank {rank}: " if self.world_size > 1 else ""
            logging.getLogger(name).log(level, "%s%s", where, text)


class _Watch(threading.Thread):
    """Waits for the ranks of one call, resolves their futures, and pings their processes.

    Failures are held back until all ranks have ended or the grace period is over, because a lost rank causes errors in the
    others. `keeping` is referenced so that it is not freed meanwhile.
    """

    def __init__(
        self,
        group: RayWorkerGroup,
        method: str,
        refs: Sequence[Any],
        ranks: Sequence[_Rank],
        *,
        seconds: float | None = None,
        pings: bool = True,
        keeping: object = None,
    ) -> None:
        super().__init__(name=f"etude-{method}", daemon=True)
        self._group, self._ray, self._method = group, group._ray, f"{group.worker_cls.__name__}.{method}"
        self._seconds, self._pinging = seconds or group._call_seconds, pings
        self._keeping = keeping  # blocks of the arguments are needed until the call ends
        self.futures: list[Future[Any]] = [Future() for _ in refs]
        self._waiting = {ref: (rank, future) for ref, rank, future in zip(refs, ranks, self.futures)}
        self._failed: list[
            tuple[_Rank, Future[Any], BaseException | None]
        ] = []  # None: abandoned because another failed
        self._pings: dict[int, tuple[Any, float]] = {}
        self._settling: float | None = None  # end of the grace period, after a first failure
        self.is_abandoned = False  # its results are no longer needed

    def start(self) -> None:
        """Starts the thread, and registers it with the group while it runs."""
        self._group._watches.add(self)
        super().start()

    def pending_ranks(self) -> list[int]:
        """The ranks that have not finished."""
        return [rank.rank for rank, _ in list(self._waiting.values())]

    def run(self) -> None:
        """Runs until every future has its result or exception."""
        try:
            self._wait()
        except BaseException as error:  # the cluster is gone, or this is our bug: no caller may hang
            self._give_up(f"could not be waited for ({one_line(error)})")
        finally:
            self._fail()
            self._group._watches.discard(self)

    def _wait(self) -> None:
        now = time.monotonic()
        deadline, next_ping = now + self._seconds, now + _PING_SECONDS
        while self._waiting:
            ready, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=1.0)
            for ref in ready:
                self._take(ref)
                del self._waiting[ref]  # only now: if `_take` raises, `run` still fails this future
            check_head()
            now = time.monotonic()
            if self._pinging and now >= next_ping:
                next_ping = now + _PING_SECONDS
                self._ping(now)
            if self._failed and self._settling is None and self._waiting and not self.is_abandoned:
                self._settling = now + _SETTLE_SECONDS
                for rank, _ in self._waiting.values():
                    rank.actor.interrupt.options(concurrency_group="control").remote()
            if now >= deadline:
                self._give_up(f"did not end within {self._seconds:g} s")
            elif self._settling is not None and now >= self._settling:
                self._give_up(f"did not end within {_SETTLE_SECONDS:g} s after another rank had failed")

    def _take(self, ref: Any) -> None:
        rank, future = self._waiting[ref]
        try:
            reply = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:  # its arguments or its result could not be sent
            self._failed.append((rank, future, error.cause if isinstance(error.cause, Exception) else error))
            return
        except self._ray.exceptions.RayError as error:
            self._failed.append((rank, future, self._group._lose(rank, self._method, f"died ({_reason(error)})")))
            return
        except Exception as error:  # its result cannot be unpickled in this process
            self._failed.append((rank, future, error))
            return
        if not isinstance(reply, Reply):
            future.set_result(reply)
            return
        self._group._log(reply.records, rank.rank)
        if reply.error is None:
            watch_blocks(reply.value, rank.actor, rank.unused)
            future.set_result(reply.value)
        else:  # while settling, the error is the interrupt's
            self._failed.append((rank, future, None if self._settling else unpack_error(reply.error)))

    def _ping(self, now: float) -> None:
        """Collects answers, marks silent ranks as lost, and pings again."""
        for ref, (rank, future) in list(self._waiting.items()):
            ping, since = self._pings.get(rank.rank, (None, now))
            if ping is not None:
                if not self._ray.wait([ping], timeout=0)[0]:
                    if now - since >= self._group._silent_seconds:
                        del self._waiting[ref]
                        lost = self._group._lose(rank, self._method, f"silent for {now - since:.0f} s")
                        self._failed.append((rank, future, lost))
                    continue
                with suppress(Exception):  # if the process died, the call itself reports it
                    self._group._log(self._ray.get(ping), rank.rank)
            self._pings[rank.rank] = rank.actor.ping.options(concurrency_group="control").remote(), now

    def _give_up(self, what: str) -> None:
        for rank, future in self._waiting.values():
            lost = self._group._lose(rank, self._method, what)
            self._failed.append((rank, future, None if self._failed else lost))
        self._waiting.clear()

    def _fail(self) -> None:
        """Sets the exceptions. A lost rank caused the other failures, so all failed futures get the loss; otherwise each
        gets its own error, and the abandoned ones get the first."""
        errors = [error for *_, error in self._failed if error is not None]
        lost = next((error for error in errors if isinstance(error, WorkerLost)), None)
        for rank, _, error in self._failed:
            if lost is None and isinstance(error, Exception):
                add_rank_note(error, rank.rank, self._group.world_size, self._method)
        for _, future, error in self._failed:
            future.set_exception(lost or error or errors[0])


def take_all(queue: deque[str]) -> list[str]:
    """Empties the queue; thread-safe."""
    items = []
    with suppress(IndexError):
        while True:
            items.append(queue.popleft())
    return items


def _reason(error: BaseException) -> str:
    """The line of Ray's message that gives the reason; its first line only names classes and ids."""
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line.startswith(("The actor died", "The actor is dead", "The node", "Worker"))]
    return one_line(RuntimeError(reasons[-1] if reasons else " ".join(lines) or type(error).__name__), 200)


def read_end(path: str, lines: int = _LOG_LINES) -> str:
    """The last lines of a file, joined by ` | `; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 8192))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    texts = [" ".join(line.split()) for line in text.splitlines() if line.strip() and not line.startswith(_RAY_MARKERS)]
    return " | ".join(texts[-lines:])[-_LOG_CHARACTERS:]
