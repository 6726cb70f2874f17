"""Workers, and the worker groups through which a single controller process drives them.

`@register` on a worker's method declares how a call is dispatched to the ranks and how their results are collected (table in
`dispatch.py`); a `WorkerGroup` executes the call. Nothing here depends on what the workers do.
"""

from etude.distributed.dispatch import (
    OUTPUT_PADDING_ROWS,
    PADDING_ROWS,
    Dispatch,
    DispatchMode,
    Execute,
    reads,
    register,
)
from etude.distributed.plane import BatchRef, DataPlane, InProcessStore, LostSamplesError
from etude.distributed.ray_group import RayWorkerGroup
from etude.distributed.resource_pool import ResourcePool
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
    "RayWorkerGroup",
    "ResourcePool",
    "Worker",
    "WorkerGroup",
    "reads",
    "register",
]
