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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from etude.distributed.cluster import check_head
from etude.distributed.dispatch import Arguments, Dispatch, Registration
from etude.distributed.plane import BatchRef, map_batches
from etude.distributed.rank_process import LogRecord, ProcessOptions, ProcessPlace, RankProcess, Reply, unpack_error
from etude.distributed.resource_pool import ResourcePool
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
_CONTROL, _BESIDE = {"concurrency_group": "control"}, {"concurrency_group": "beside"}
_CONCURRENCY_GROUPS = {"control": 2, "beside": 8}
"""Threads of an actor for pings and interrupts, and for what runs beside its other calls, which run one after another."""


@dataclass(frozen=True)
class _Rank:
    """An actor, and where it runs."""

    rank: int
    actor: Any
    place: ProcessPlace


@dataclass(eq=False)
class _Call:
    """A running call: `waiting` has the place among the results, and the rank, of each outstanding reply. `keeping` is
    referenced so that its blocks are not freed meanwhile."""

    method: str
    waiting: dict[Any, tuple[int, _Rank]]
    seconds: float
    pings: bool = True
    keeping: object = None
    results: dict[int, Any] = field(default_factory=dict)
    errors: list[tuple[int, BaseException]] = field(default_factory=list)
    settles: float | None = None  # end of the grace period, after a first failure
    is_abandoned: bool = False  # its results are no longer needed
    ended: threading.Event = field(default_factory=threading.Event)
    future: Future[list[Any]] = field(default_factory=Future)


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
        self._calls: set[_Call] = set()
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
        starting = self._supervise("start", [actor.place.remote() for actor in actors], _START_SECONDS, pings=False)
        places = starting.result()
        self._ranks = [_Rank(rank, actor, place) for rank, (actor, place) in enumerate(zip(actors, places))]
        port = 0
        if self.world_size > 1:
            store = actors[0].open_store.remote(places[0].address, self.world_size, self._call_seconds)
            (port,) = self._supervise("open_store", [store]).result()
        given = ray.put((args, kwargs))
        device, refs = "cuda:0" if pool.use_gpu else None, []  # Ray shows a process its own GPU alone
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
        self._supervise("__init__", refs).result()

    @property
    def places(self) -> list[ProcessPlace]:
        return [rank.place for rank in self._ranks]

    def direct(self, name: str, rank: int = 0) -> Callable[..., Any]:
        """See `WorkerGroup.direct`; an `async` method runs in the rank's process and can be awaited here."""
        call = super().direct(name, rank)
        if not inspect.iscoroutinefunction(getattr(self.worker_cls, name)):
            return call

        async def run(*args: Any, **kwargs: Any) -> Any:
            return (await asyncio.wrap_future(self._run(name, [(args, kwargs)], [[rank]])))[0]

        return run

    def interrupt(self) -> None:
        """Asks the running calls to end early and waits for a grace period. A rank that does not end its call is not lost:
        it can still save in the background, and `close` kills it."""
        running, end = list(self._calls), time.monotonic() + _SETTLE_SECONDS
        for call in running:
            call.is_abandoned = True
        for rank in self._ranks:
            rank.actor.interrupt.options(**_CONTROL).remote()
        for call in running:
            call.ended.wait(max(0.0, end - time.monotonic()))
            self._gone.update(rank.rank for _, rank in list(call.waiting.values()))

    def close(self) -> None:
        """Closes the workers that answer, within the grace period, and ends their processes."""
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

    def _run(self, method: str, parts: Sequence[Arguments], ranks: Sequence[Sequence[int]]) -> Future[list[Any]]:
        known, refs, called = self._alive(), list[Any](), list[_Rank]()
        registration = self._methods[method]
        direct = registration.dispatch_mode is Dispatch.DIRECT_ROLLOUT_METHOD
        thread = _BESIDE if direct or registration.in_background else {}
        if self.store is not None:
            self.store.sweep()
        for part, same in zip(parts, ranks, strict=True):
            given = self._ray.put(part) if len(same) > 1 else part
            for rank in (known[number] for number in same):
                refs.append(rank.actor.call.options(**thread).remote(method, given, self.store))
                called.append(rank)
        return self._supervise(method, refs, ranks=called, keeping=parts)

    def _alive(self) -> list[_Rank]:
        """Returns the ranks, which another thread may close meanwhile; raises WorkerLost if the group is unusable."""
        ranks = self._ranks
        check_head()
        if self._lost is not None:
            raise self._lost
        return ranks

    def _places(self, mesh: str) -> list[MeshPlace]:
        ranks = self._alive()
        asked = [rank.actor.mesh_place.remote(mesh) for rank in ranks]
        return self._supervise("mesh_place", asked, ranks=ranks).result()

    # -- supervision -----------------------------------------------------------------------------------------------

    def _supervise(
        self,
        method: str,
        refs: Sequence[Any],
        seconds: float | None = None,
        *,
        ranks: Sequence[_Rank] | None = None,
        pings: bool = True,
        keeping: object = None,
    ) -> Future[list[Any]]:
        """Waits for the replies of `ranks` (default: all, in order) in a thread, and returns the future of their values."""
        waiting = {ref: (number, rank) for number, (ref, rank) in enumerate(zip(refs, ranks or self._ranks))}
        name, limit = f"{self.worker_cls.__name__}.{method}", seconds or self._call_seconds
        call = _Call(name, waiting, limit, pings, keeping)
        self._calls.add(call)
        threading.Thread(target=self._finish, args=(call,), name=f"etude-{method}", daemon=True).start()
        return call.future

    def _finish(self, call: _Call) -> None:
        """Waits for a call and resolves its future. A lost rank causes errors in the others, so the loss is raised if there
        is one, otherwise the error of the first rank."""
        try:
            self._wait(call)
        except BaseException as error:  # the cluster is gone, or this is our bug: no caller may hang
            self._give_up(call, f"could not be waited for ({one_line(error)})")
        finally:
            self._calls.discard(call)
            call.ended.set()
        if not call.errors:
            call.future.set_result([call.results[number] for number in sorted(call.results)])
            return
        rank, first = min(call.errors, key=lambda failed: (not isinstance(failed[1], WorkerLost), failed[0]))
        if not isinstance(first, WorkerLost):
            add_rank_note(first, rank, self.world_size, call.method)
        call.future.set_exception(first)

    def _wait(self, call: _Call) -> None:
        now = time.monotonic()
        deadline, next_ping, pings = now + call.seconds, now + _PING_SECONDS, dict[int, tuple[Any, float]]()
        while call.waiting:
            ready, _ = self._ray.wait(list(call.waiting), num_returns=1, timeout=1.0)
            for ref in ready:
                self._take(call, ref)
                del call.waiting[ref]  # only now: if `_take` raises, the rank is given up
            check_head()
            now = time.monotonic()
            if call.pings and now >= next_ping:
                next_ping = now + _PING_SECONDS
                self._ping(call, pings, now)
            if call.errors and call.settles is None and call.waiting and not call.is_abandoned:
                call.settles = now + _SETTLE_SECONDS
                for _, rank in call.waiting.values():
                    rank.actor.interrupt.options(**_CONTROL).remote()
            if now >= deadline:
                self._give_up(call, f"did not end within {call.seconds:g} s")
            elif call.settles is not None and now >= call.settles:
                self._give_up(call, f"did not end within {_SETTLE_SECONDS:g} s after another rank had failed")

    def _take(self, call: _Call, ref: Any) -> None:
        """Takes a reply. While a call settles, errors are answers to the interrupt."""
        number, rank = call.waiting[ref]
        error: BaseException | None = None
        try:
            reply = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as failed:  # its arguments or its result could not be sent
            error = failed.cause if isinstance(failed.cause, Exception) else failed
        except self._ray.exceptions.RayError as failed:
            error = self._lose(rank, call.method, f"died ({_reason(failed)})")
        except Exception as failed:  # its result cannot be unpickled in this process
            error = failed
        else:
            if isinstance(reply, Reply):
                self._log(reply.records, rank.rank)
                error = None if reply.error is None else unpack_error(reply.error)
                reply = map_batches(reply.value, BatchRef, BatchRef.watched)
            call.results[number] = reply
        if error is not None and (call.settles is None or isinstance(error, WorkerLost)):
            call.errors.append((rank.rank, error))

    def _ping(self, call: _Call, pings: dict[int, tuple[Any, float]], now: float) -> None:
        """Collects answers, marks silent ranks as lost, and pings again."""
        for ref, (_, rank) in list(call.waiting.items()):
            ping, since = pings.get(rank.rank, (None, now))
            if ping is not None and not self._ray.wait([ping], timeout=0)[0]:
                if now - since >= self._silent_seconds:
                    del call.waiting[ref]
                    call.errors.append((rank.rank, self._lose(rank, call.method, f"silent for {now - since:.0f} s")))
                continue
            if ping is not None:
                with suppress(Exception):  # if the process died, the call itself reports it
                    self._log(self._ray.get(ping), rank.rank)
            pings[rank.rank] = rank.actor.ping.options(**_CONTROL).remote(), now

    def _give_up(self, call: _Call, what: str) -> None:
        failed = bool(call.errors)
        for _, rank in call.waiting.values():
            lost = self._lose(rank, call.method, what)
            call.errors += [] if failed else [(rank.rank, lost)]
        call.waiting.clear()

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

    # -- logs ------------------------------------------------------------------------------------------------------

    def _last_lines(self, place: ProcessPlace) -> str:
        """The last lines of the process's log, read on its node."""
        if not place.log or os.path.exists(place.log):
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


def _reason(error: BaseException) -> str:
    """The line of Ray's message that gives the reason; its first line only names classes and ids."""
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line.startswith(("The actor died", "The actor is dead", "The node", "Worker"))]
    return one_line(RuntimeError(reasons[-1] if reasons else " ".join(lines) or type(error).__name__), 200)


def read_end(path: str) -> str:
    """The last lines of a file, joined by ` | `; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 8192))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    texts = [" ".join(line.split()) for line in text.splitlines() if line.strip() and not line.startswith(_RAY_MARKERS)]
    return " | ".join(texts[-_LOG_LINES:])[-_LOG_CHARACTERS:]
