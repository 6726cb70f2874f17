"""`QueueStore`: blocks in TransferQueue (the PyPI package, extra `[transferqueue]`), one key per row.

Rows are spread over its storage units, actors with their own memory on the nodes of the cluster, and fetched individually:
a reader gets only its own rows. Each row's tensors are sent as bytes, so that every dtype and shape is preserved.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from etude.distributed.cluster import check_head
from etude.distributed.plane import Block, BlockStore, Piece
from etude.errors import ConfigError, MissingExtraError, WorkerLost, one_line
from etude.protocol import DataProto, byte_view

_PARTITION = "etude"
_SECONDS = "60"  # TransferQueue's timeout for a storage unit; its default is 200


def _queue() -> Any:
    os.environ.setdefault("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", _SECONDS)  # read at import
    os.environ.setdefault("TQ_SIMPLE_STORAGE_MAX_ATTEMPTS", "1")
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    try:
        import transfer_queue
    except ImportError as error:
        raise MissingExtraError("the data plane's TransferQueue", "transferqueue") from error
    return transfer_queue


class QueueStore(BlockStore):
    """Blocks in TransferQueue on the cluster that this process is connected to; `start` starts it."""

    CPUS = 3  # of `start`: two storage units and the controller

    def __init__(self) -> None:
        self._watched: set[str] = set()
        self._unused: deque[tuple[str, int]] = deque()  # names and rows of watched blocks that nothing refers to

    def __reduce__(self) -> Any:
        return QueueStore, ()

    @classmethod
    def start(cls, units: int = CPUS - 1) -> QueueStore:
        """Starts TransferQueue with `units` storage units.

        Raises:
            MissingExtraError: it is not installed.
            ConfigError: the cluster has too few free CPUs for its actors; it would wait for them forever.
        """
        queue = _queue()
        import ray
        from omegaconf import OmegaConf

        free = ray.available_resources().get("CPU", 0.0)
        if free < units + 1:
            raise ConfigError(
                f"TransferQueue needs {units + 1} free CPUs in the cluster, one for its controller and one for each of "
                f"{units} storage units; {free:g} are free"
            )
        queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": units}}}))
        return cls()

    def write(self, data: DataProto) -> Block:
        name, rows = uuid.uuid4().hex, len(data)
        fields: dict[str, Any] = {}
        handles: dict[str, Any] = {}  # tensors: dtype and shape of a row; objects: shape only
        for key, tensor in () if data.batch is None else data.batch.items():
            handles[key] = (name, tensor.dtype, tensor.shape[1:])
            if tensor.numel():
                fields[key] = byte_view(tensor).reshape(rows, -1)
        for key, column in data.non_tensor_batch.items():
            handles[key] = (name, None, column.shape[1:])
            fields[key] = NonTensorStack(*[NonTensorData(_Cell(column[row])) for row in range(rows)])
        if fields:
            _queue().kv_batch_put(_keys(name, range(rows)), _PARTITION, TensorDict(fields, batch_size=[rows]))
        return Block(rows, handles, frozenset(data.non_tensor_batch), "a storage unit of TransferQueue")

    def read(self, pieces: Sequence[Piece], timeout: float) -> list[DataProto]:
        return [self._read(piece) for piece in pieces]

    def watch(self, block: Block) -> None:
        name, *_ = next(iter(block.handles.values()), ("",))
        if name and name not in self._watched:
            self._watched.add(name)
            weakref.finalize(block, self._unused.append, (name, block.rows)).atexit = False  # not freed in any thread

    def sweep(self) -> None:
        with suppress(IndexError):  # another thread may sweep
            while True:
                name, rows = self._unused.popleft()
                self._watched.discard(name)
                _queue().kv_clear(_keys(name, range(rows)), _PARTITION)

    def close(self) -> None:
        with suppress(WorkerLost):
            check_head()
            _queue().close()

    def _read(self, piece: Piece) -> DataProto:
        wanted = list(range(piece.block.rows)) if piece.rows is None else sorted(set(piece.rows))
        handles = {name: piece.block.handles[name] for name in piece.columns}
        stored = [name for name, (_, dtype, tail) in handles.items() if dtype is None or tail.numel()]
        fetched: Any = {}
        if stored:
            keys = _keys(handles[stored[0]][0], wanted)
            try:
                fetched = _queue().kv_batch_get(keys, _PARTITION, stored)
            except Exception as error:  # its client may raise anything for a key or storage unit that is gone
                raise LookupError(f"{type(error).__name__}: {one_line(error)}") from error
            if fetched.batch_size != torch.Size([len(wanted)]):
                raise LookupError(f"TransferQueue has {len(fetched)} of {len(wanted)} rows")
        columns = {name: _column(fetched.get(name, None), len(wanted), handles[name]) for name in piece.columns}
        data = DataProto.from_single_dict(columns)
        if piece.rows is None:
            return data
        places = {row: place for place, row in enumerate(wanted)}
        return data.select_idxs([places[row] for row in piece.rows])


class _Cell:
    """Wraps an object of a row: TransferQueue treats arrays, tensors and None specially."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _keys(name: str, rows: Sequence[int]) -> list[str]:
    return [f"{name}/{row}" for row in rows]


def _column(fetched: Any, rows: int, handle: tuple[str, torch.dtype | None, Any]) -> torch.Tensor | np.ndarray:
    _, dtype, tail = handle
    if dtype is None:
        column = np.empty((rows, *tail), dtype=object)
        for row, cell in enumerate(fetched.tolist()):
            column[row] = cell.value
        return column
    if fetched is None:
        return torch.empty((rows, *tail), dtype=dtype)
    packed = fetched.values() if fetched.is_nested else fetched
    return packed.reshape(-1).contiguous().view(dtype).reshape(rows, *tail)
