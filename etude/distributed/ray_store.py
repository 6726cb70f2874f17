"""`RayStore`: blocks as plain Ray objects, one a column, on the node of the worker that wrote them.

The writer owns its objects: they live as long as it does and somebody refers to them. Ray fetches to a node what a reader
there asks for, once for all its readers, and they read it in place. Ray is imported at the first use.
"""

from __future__ import annotations

from collections.abc import Sequence

from etude.distributed.plane import Block, BlockStore, Piece, select_rows, tensor_bytes
from etude.errors import one_line
from etude.protocol import DataProto


class RayStore(BlockStore):
    """Blocks in the object stores of the cluster that this process is connected to."""

    def write(self, data: DataProto) -> Block:
        import ray

        tensors = [] if data.batch is None else list(data.batch.keys())
        handles = {name: ray.put(data.select([name], [], [])) for name in tensors}
        handles |= {name: ray.put(data.select([], [name], [])) for name in data.non_tensor_batch}
        return Block(len(data), handles, frozenset(data.non_tensor_batch), tensor_bytes(data), this_node())

    def read(self, pieces: Sequence[Piece], timeout: float) -> list[DataProto]:
        import ray
        from ray.exceptions import RayError

        refs = [piece.block.handles[name] for piece in pieces for name in piece.columns]
        try:
            columns = iter(ray.get(refs, timeout=timeout))
        except RayError as error:
            raise LookupError(f"{type(error).__name__}: {one_line(error)}") from error
        found = []
        for piece in pieces:
            whole = next(columns)
            for _ in piece.columns[1:]:
                whole = whole.union(next(columns))
            found.append(select_rows(whole, piece.rows))
        return found

    def drop(self, block: Block) -> None:
        """Nothing to do: Ray frees the objects when the last reference to the block goes."""


def this_node() -> str:
    """Id and address of the node of this process."""
    import ray

    context = ray.get_runtime_context()
    return f"node {context.get_node_id()[:8]} ({ray.util.get_node_ip_address()})"
