"""`Worker`: the base class of workers, of which a group has one per rank.

Invariant: a worker gets its rank once, at construction, and never from global state. A group builds it as `worker_cls(*args,
rank=…, world_size=…, **kwargs)`; a subclass with its own arguments passes the rest on:

    class ActorWorker(Worker):
        def __init__(self, config: ActorConfig, **place: Any) -> None:
            super().__init__(**place)

A group that starts processes sets `torch.distributed`'s environment variables WORLD_SIZE, RANK, LOCAL_WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT before it builds the worker, and passes `rank` and `world_size` with the values
of RANK and WORLD_SIZE. Workers in one process share its environment, so they must not read these variables.

Chunks are passed by reference where possible: a worker must not write to the tensors or row objects it gets; it may
add columns to its chunk, or keys to the chunk's meta_info.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from etude.distributed.dispatch import Dispatch, register
from etude.distributed.usage import Usage, measure_usage


@dataclass(frozen=True)
class MeshPlace:
    """A rank's place in a mesh: it holds shard `dp_rank` of `dp_size`, as do the other ranks of its tensor-parallel team;
    `collects`: whether it has the output of a call."""

    dp_rank: int
    dp_size: int
    collects: bool = True


class Worker:
    """One rank of a group: `rank` in [0, world_size), and the `device` of its tensors.

    Raises:
        ValueError: `rank` is not in [0, world_size).
    """

    def __init__(self, *, rank: int, world_size: int, device: torch.device | str = "cpu") -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)

    def mesh_place(self, mesh: str) -> MeshPlace:
        """This rank's place in the mesh that a method's `register` names; called once, before the first call that uses the
        mesh. By default each rank holds its own shard."""
        return MeshPlace(self.rank, self.world_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def usage(self) -> Usage:
        """CPU time and GPU of this rank's process and its descendants."""
        return measure_usage(self.device)

    def interrupt(self) -> None:
        """Asks the running call to end early with an exception. Called from another thread, and only if ranks are
        processes (otherwise the call itself gets the driver's KeyboardInterrupt)."""

    def close(self) -> None:
        """Stops the worker's tasks; called once, when its group ends."""
