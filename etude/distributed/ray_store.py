"""`RayStore`: blocks as Ray objects, one per column, on the node of the process that wrote them.

The writer owns them: they live as long as it does and something refers to them, which Ray counts. Ray copies a column to a
node once for all readers there, and they read it in place. Ray is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from etude.distributed.plane import Block, BlockStore, Piece, select_rows
from etude.errors import one_line
from etude.protocol import DataProto, pack_tensor, unpack_tensor


class RayStore(BlockStore):
    """Blocks in the object stores of the cluster that this process is connected to."""

    def write(self, data: DataProto) -> Block:
        import ray

        tensors = {} if data.batch is None else dict(data.batch.items())
        columns: dict[str, Any] = {name: pack_tensor(tensor) for name, tensor in tensors.items()}
        handles = {name: ray.put(column) for name, column in {**columns, **data.non_tensor_batch}.items()}
        return Block(len(data), handles, frozenset(data.non_tensor_batch), _this_node())

    def read(self, pieces: Sequence[Piece], timeout: float) -> list[DataProto]:
        import ray
        from ray.exceptions import RayError

        refs = list(dict.fromkeys(piece.block.handles[name] for piece in pieces for name in piece.columns))
        try:
            found = dict(zip(refs, ray.get(refs, timeout=timeout)))
        except RayError as error:
            raise LookupError(f"{type(error).__name__}: {one_line(error)}") from error
        batches = []
        for block, names, rows in pieces:
            columns = {name: found[block.handles[name]] for name in names}
            tensors = {name: column for name, column in columns.items() if name not in block.objects}
            unpacked = {name: unpack_tensor(*column) for name, column in tensors.items()}
            batches.append(select_rows(DataProto.from_single_dict({**columns, **unpacked}), rows))
        return batches


@cache
def _this_node() -> str:
    """Id and address of this process's node."""
    import ray

    context = ray.get_runtime_context()
    return f"node {context.get_node_id()[:8]} ({ray.util.get_node_ip_address()})"
