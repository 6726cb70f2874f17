"""`RayStore`: blocks as Ray objects, one per column or, of large tensors, per slice of rows, on the node of the process that
wrote them.

The writer owns them: they live as long as it does and something refers to them, which Ray counts. Ray copies an object to a
node once for all readers there; a column of one slice is read in place. Ray is imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from etude.distributed.plane import Block, BlockStore, Piece
from etude.errors import one_line
from etude.protocol import DataProto, pack_tensor, unpack_tensor

_SLICE_BYTES = 1 << 20
_MAX_SLICES = 64  # of a column, so that references do not grow with the length of rows


class _Column(NamedTuple):
    """A column's objects, each with `rows` rows (the last perhaps with fewer)."""

    rows: int
    refs: tuple[Any, ...]


class RayStore(BlockStore):
    """Blocks in the object stores of the cluster that this process is connected to."""

    def write(self, data: DataProto) -> Block:
        import ray

        handles = {name: _Column(len(data), (ray.put(column),)) for name, column in data.non_tensor_batch.items()}
        for name, tensor in () if data.batch is None else data.batch.items():
            rows = max(-(-len(data) // _MAX_SLICES), len(data) * _SLICE_BYTES // max(tensor.nbytes, 1), 1)
            handles[name] = _Column(rows, tuple(ray.put(pack_tensor(part)) for part in tensor.split(rows)))
        return Block(len(data), handles, frozenset(data.non_tensor_batch), _this_node())

    def read(self, pieces: Sequence[Piece], timeout: float) -> list[DataProto]:
        import ray
        from ray.exceptions import RayError

        needed = [_needed(block.handles[name], rows) for block, names, rows in pieces for name in names]
        refs = list(dict.fromkeys(ref for each in needed for ref in each.values()))
        try:
            found = dict(zip(refs, ray.get(refs, timeout=timeout)))
        except RayError as error:
            raise LookupError(f"{type(error).__name__}: {one_line(error)}") from error
        return [
            DataProto.from_single_dict({name: _read(block.handles[name], rows, found) for name in names})
            for block, names, rows in pieces
        ]


def _needed(column: _Column, rows: Sequence[int] | None) -> dict[int, Any]:
    """The objects that have `rows` (None: all), by number."""
    numbers = range(len(column.refs)) if rows is None else sorted({row // column.rows for row in rows})
    return {number: column.refs[number] for number in numbers}


def _read(column: _Column, rows: Sequence[int] | None, found: Mapping[Any, Any]) -> Any:
    """The rows of a column: a tensor or an array of objects; a view if they are adjacent in one object."""
    needed = _needed(column, rows)
    parts = [found[ref] for ref in needed.values()]
    parts = [unpack_tensor(*part) if isinstance(part, tuple) else part for part in parts]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if rows is None:
        return whole
    starts = {number: place * column.rows for place, number in enumerate(needed)}
    places = [starts[row // column.rows] + row % column.rows for row in rows]
    adjacent = places == list(range(places[0], places[0] + len(places)))
    return whole[places[0] : places[-1] + 1] if adjacent else whole[places]


@cache
def _this_node() -> str:
    """Id and address of this process's node."""
    import ray

    context = ray.get_runtime_context()
    return f"node {context.get_node_id()[:8]} ({ray.util.get_node_ip_address()})"
