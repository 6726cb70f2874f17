"""Workers, and the groups through which a single-process controller drives them.

`@register` on a worker's method says how a call is divided among the ranks and how their results are gathered (table in
`dispatch.py`); a `WorkerGroup` carries it out. Nothing here depends on what the workers do.
"""

from etude.distributed.dispatch import OUTPUT_PADDING_ROWS, PADDING_ROWS, Dispatch, DispatchMode, Execute, register
from etude.distributed.plane import BatchRef, DataPlane, InProcessStore, LostSamplesError, PlaneFullError
from etude.distributed.pool import ResourcePool
from etude.distributed.ray_group import RayWorkerGroup
from etude.distributed.worker import MeshPlace, Worker
from etude.distributed.worker_group import InProcessWorkerGroup, WorkerGroup

__all__ = [
    "OUTPUT_PADDING_ROWS",
    "PADDING_ROWS",
    "BatchRef",
    "DataPlane",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "InProcessStore",
    "InProcessWorkerGroup",
    "LostSamplesError",
    "MeshPlace",
    "PlaneFullError",
    "RayWorkerGroup",
    "ResourcePool",
    "Worker",
    "WorkerGroup",
    "register",
]
