"""`WorkerGroup`: the controller's handle on all ranks of a worker class.

Invariant: a group has exactly the registered methods of its worker class, and each of them divides the call, runs it on the
ranks and collects the results as `dispatch.py` describes, however the ranks run. Groups differ only in `_run`. A rank's
exception reaches the caller unchanged, with a note that names the rank and the method (also logged, for the commands that
print an error as one line).

In one process the ranks run one after another, so there a worker must not wait for another rank; `ray_group.py` has the
group whose ranks are processes of a cluster.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from etude.distributed.dispatch import TRAIN_MESH, Arguments, Dispatch, Execute, Registration, registered_methods
from etude.distributed.plane import BatchRef, BlockStore
from etude.distributed.worker import MeshPlace, Worker
from etude.errors import EtudeError, one_line
from etude.protocol import DataProto, DataProtoFuture
from etude.registry import did_you_mean

_log = logging.getLogger(__name__)
E = TypeVar("E", bound=BaseException)


class WorkerGroup(ABC):
    """`world_size` ranks of `worker_cls`; each registered method of the worker is a method of the group.

    Raises:
        ValueError: `world_size` is less than 1, or a registered method's name clashes with the group's own.
    """

    def __init__(self, worker_cls: type[Worker], world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, is {world_size}")
        self.store: BlockStore | None = None  # where ranks in other processes write the batches that they return
        self.worker_cls = worker_cls
        self.world_size = world_size
        self._methods = registered_methods(worker_cls)
        self._meshes: dict[str, list[MeshPlace]] = {}
        for name, registration in self._methods.items():
            if hasattr(type(self), name) or name in vars(self):
                raise ValueError(f"{worker_cls.__name__}.{name} cannot be registered: a group has its own '{name}'")
            setattr(self, name, functools.partial(self._call, name, registration))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._unknown_method(name)

    def direct(self, name: str, rank: int = 0) -> Callable[..., Any]:
        """Returns the DIRECT_ROLLOUT_METHOD `name` of one rank; the controller does not divide or collect its calls.

        Raises:
            AttributeError: no registered method has that name.
            ValueError: the method is registered with another mode, or there is no such rank.
        """
        if name not in self._methods:
            raise self._unknown_method(name)
        if self._methods[name].dispatch_mode is not Dispatch.DIRECT_ROLLOUT_METHOD:
            raise ValueError(f"'{name}' is not a DIRECT_ROLLOUT_METHOD: call it on the group")
        if not 0 <= rank < self.world_size:
            raise ValueError(f"no rank {rank} in a group of {self.world_size}")
        return lambda *args, **kwargs: self._run(name, [(args, kwargs)], [[rank]]).result()[0]

    def keep(self, data: DataProto) -> DataProto | BatchRef:
        """Writes a batch of the driver to the group's store and returns the reference; without a store, the batch."""
        return data if self.store is None or not len(data) else BatchRef.of(data, self.store)

    def columns_of(self, method: str) -> frozenset[str] | None:
        """The columns that a method reads; None, all of them, if it does not declare any."""
        registration = self._methods[method]
        return None if registration.columns is None else registration.columns | registration.optional

    @property
    def dp_size(self) -> int:
        """Number of data-parallel shards of a training batch: `world_size`, unless several ranks share a shard."""
        return self._mesh(TRAIN_MESH)[0].dp_size

    def close(self) -> None:  # noqa: B027  (a group may have nothing to close)
        """Closes the ranks; no method may be called afterwards."""

    @abstractmethod
    def _run(self, method: str, parts: Sequence[Arguments], ranks: Sequence[Sequence[int]]) -> Future[list[Any]]:
        """Starts a method on each of `ranks[i]` with the arguments `parts[i]`; returns the future of their results, in that
        order.

        A failing rank does not stop the others. The future's exception is that of the first one, annotated by
        `add_rank_note`.
        """

    @abstractmethod
    def _places(self, mesh: str) -> list[MeshPlace]:
        """Each rank's place in a mesh."""

    def _call(self, name: str, registration: Registration, /, *args: Any, **kwargs: Any) -> Any:
        method, mode = f"{self.worker_cls.__name__}.{name}", registration.mode
        args = tuple(registration.select(method, value) for value in args)
        kwargs = {key: registration.select(method, value) for key, value in kwargs.items()}
        ranks, answering = self._targets(registration)
        parts = mode.divide(len(ranks), args, kwargs)
        if len(parts) != len(ranks):
            raise ValueError(f"a dispatch mode divided a call into {len(parts)} parts for {len(ranks)} shards")

        def collect(results: list[Any]) -> Any:
            return mode.collect([results[0][number] for number in answering], args, kwargs)

        pending = DataProtoFuture([self._run(name, parts, ranks)], collect)
        return pending.get() if registration.blocking else pending

    def _targets(self, registration: Registration) -> tuple[list[list[int]], list[int]]:
        """Returns the ranks that get the arguments of each shard, and the indices, into these ranks in order, of those
        whose results are collected."""
        everyone = list(range(self.world_size))
        if registration.execute_mode is Execute.RANK_ZERO:
            return [[0]], [0]
        if registration.dispatch_mode is Dispatch.ONE_TO_ALL:
            return [everyone], everyone
        if not registration.is_data_parallel:
            return [[rank] for rank in everyone], everyone
        places = self._mesh(registration.mesh)
        shards = [[rank for rank in everyone if places[rank].dp_rank == shard] for shard in range(places[0].dp_size)]
        order = [rank for shard in shards for rank in shard]
        return shards, [order.index(next(rank for rank in shard if places[rank].collects)) for shard in shards]

    def _mesh(self, mesh: str) -> list[MeshPlace]:
        """Each rank's place in a mesh, cached.

        Raises:
            ValueError: the ranks' answers are inconsistent.
        """
        if mesh not in self._meshes:
            places = self._places(mesh)
            size, output = places[0].dp_size, {place.dp_rank for place in places if place.collects}
            if any(place.dp_size != size or not 0 <= place.dp_rank < size for place in places) or len(output) != size:
                raise ValueError(
                    f"the mesh '{mesh}' of {self.worker_cls.__name__} has shards that no rank holds: {places}"
                )
            self._meshes[mesh] = places
        return self._meshes[mesh]

    def _unknown_method(self, name: str) -> AttributeError:
        known, hint = ", ".join(sorted(self._methods)) or "none", did_you_mean(name, self._methods)
        return AttributeError(
            f"{self.worker_cls.__name__} has no registered method '{name}'{hint} (there are: {known})"
        )


class InProcessWorkerGroup(WorkerGroup):
    """A group whose ranks live in this process and run one after another; a call runs immediately.

    `args` and `kwargs` go to the constructor of every worker, together with `rank` and `world_size`.
    """

    def __init__(self, worker_cls: type[Worker], world_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(worker_cls, world_size)
        self._workers = [worker_cls(*args, rank=rank, world_size=world_size, **kwargs) for rank in range(world_size)]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _run(self, method: str, parts: Sequence[Arguments], ranks: Sequence[Sequence[int]]) -> Future[list[Any]]:
        results, failed, future = [], list[Exception](), Future[list[Any]]()
        for (args, kwargs), rank in ((part, rank) for part, same in zip(parts, ranks, strict=True) for rank in same):
            own = tuple(map(_shallow_copy, args)), {key: _shallow_copy(value) for key, value in kwargs.items()}
            try:
                results.append(getattr(self._workers[rank], method)(*own[0], **own[1]))
            except Exception as error:
                failed.append(add_rank_note(error, rank, self.world_size, f"{self.worker_cls.__name__}.{method}"))
        if failed:
            future.set_exception(failed[0])
        else:
            future.set_result(results)
        return future

    def _places(self, mesh: str) -> list[MeshPlace]:
        return [worker.mesh_place(mesh) for worker in self._workers]


def _shallow_copy(value: Any) -> Any:
    """Copies a batch shallowly, so that columns a rank adds stay private to it; returns anything else unchanged."""
    return value[:] if isinstance(value, DataProto) else value


def add_rank_note(error: E, rank: int, world_size: int, method: str) -> E:
    """Adds a note to `error` with the rank and method that raised it, and logs it; returns the error.

    A one-line error, which the user sees anyway, is logged only if the rank adds information.
    """
    note = f"raised on rank {rank} of {world_size} in {method}"
    error.__notes__ = [*getattr(error, "__notes__", []), note]  # what add_note does, on Python 3.10 too
    if world_size > 1 or not isinstance(error, EtudeError):
        _log.error("%s: %s: %s", note, type(error).__name__, one_line(error))
    return error
