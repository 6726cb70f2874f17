"""Stores for a Ray cluster. `RayStore`: Ray objects, one per column, on the node of the process that wrote them.
`RankStore`: the memory of the rank that wrote them, plus Ray objects for what other processes read.

The writer owns its Ray objects: they live as long as it does and something refers to them. Ray copies an object to a node
once for all readers there, and they read it in place. Ray is imported on first use.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from uuid import uuid4

import numpy as np

from etude.distributed.plane import (
    BatchRef,
    Block,
    BlockStore,
    Layout,
    Piece,
    columns_of,
    map_batches,
    select_rows,
    tensor_bytes,
)
from etude.errors import one_line
from etude.protocol import DataProto

_kept: dict[str, DataProto] = {}
"""In a rank: the blocks that it wrote, by key, until the driver no longer refers to them."""
_lenders: dict[str, Any] = {}
"""In the driver: the actor that keeps each block, by key."""


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

        refs = list(dict.fromkeys(piece.block.handles[name] for piece in pieces for name in piece.columns))
        try:
            objects = dict(zip(refs, ray.get(refs, timeout=timeout)))
        except RayError as error:
            cause = getattr(error, "cause", None) or error  # Ray wraps a rank's own error
            raise LookupError(f"{type(cause).__name__}: {one_line(cause)}") from error
        batches = []
        for piece in pieces:
            whole = DataProto()
            for ref in dict.fromkeys(piece.block.handles[name] for name in piece.columns):
                whole = whole.union(objects[ref])
            batches.append(select_rows(_select(whole, piece.columns), piece.rows))
        return batches

    def drop(self, block: Block) -> None:
        """Does nothing: Ray frees the objects with the last reference to the block."""


class RankStore(RayStore):
    """Blocks of the ranks of worker groups. Each stays, without pickling, in the process that wrote it, which reads it
    directly. The rows and columns that another process reads become one Ray object, which the driver requests when it sends
    the reference there (`lend_batches`). The driver also reports blocks that nothing refers to any more (`watch_blocks`)."""

    def write(self, data: DataProto) -> Block:
        key = uuid4().hex
        _kept[key] = data
        handles = dict.fromkeys(columns_of(data), key)
        return Block(len(data), handles, frozenset(data.non_tensor_batch), tensor_bytes(data), this_node())

    def read(self, pieces: Sequence[Piece], timeout: float) -> list[DataProto]:
        near = [piece if _key(piece.block) in _kept else _lend(piece) for piece in pieces]
        lent = iter(super().read([piece for piece in near if _key(piece.block) is None], timeout))
        batches = []
        for block, columns, rows in near:
            key = _key(block)
            batches.append(next(lent) if key is None else cut_kept(key, columns, rows))
        return batches


def cut_kept(key: str, columns: Sequence[str], rows: Sequence[int] | None) -> DataProto:
    """Reads columns and rows of a block that this process keeps. Raises LookupError if it does not."""
    return select_rows(_select(_kept[key], columns), rows)


def forget_kept(keys: Iterable[str]) -> None:
    """Frees blocks that this process keeps."""
    for key in keys:
        _kept.pop(key, None)


def watch_blocks(value: Any, actor: Any, unused: deque[str]) -> None:
    """Records that `actor` keeps the blocks that `value`, its result, refers to; once nothing in this process refers to a
    block any more, its key is added to `unused`."""

    def forget(key: str) -> None:
        _lenders.pop(key, None)
        unused.append(key)

    def note(ref: BatchRef) -> None:
        for block in (block for layout in ref.layouts for block in layout.blocks):
            key = _key(block)
            if key is not None and key not in _lenders:
                _lenders[key] = actor
                weakref.finalize(block, forget, key).atexit = False

    map_batches(value, BatchRef, note)


def lend_batches(value: Any, actor: Any) -> Any:
    """Prepares `value` for sending to `actor`: references to blocks that other actors keep become references to Ray
    objects."""

    def lend(ref: BatchRef) -> BatchRef:
        return replace(ref, layouts=tuple(map(lend_layout, ref.layouts)))

    def lend_layout(layout: Layout) -> Layout:
        blocks: list[Block] = []
        numbers, rows = layout.block.copy(), layout.row.copy()
        for places, piece in zip(*layout.pieces()):
            key = _key(piece.block)
            if key is not None and _lenders.get(key) is not actor:
                piece, rows[places] = _lend(piece), np.arange(len(places))
            numbers[places] = len(blocks)
            blocks.append(piece.block)
        return replace(layout, blocks=tuple(blocks), block=numbers, row=rows)

    return map_batches(value, BatchRef, lend)


def _lend(piece: Piece) -> Piece:
    """Returns the piece as a whole block made of one Ray object; a piece already in the object store is unchanged."""
    (block, columns, rows), key = piece, _key(piece.block)
    if key is None:
        return piece
    if key not in _lenders:
        raise LookupError("its process keeps it no more")
    ref = _lenders[key].lend.options(concurrency_group="lend").remote(key, columns, rows)
    lent = replace(block, rows=block.rows if rows is None else len(rows), handles=dict.fromkeys(columns, ref))
    return Piece(lent, columns, None)


def _key(block: Block) -> str | None:
    """The key of a block that a rank keeps; None if it is in the object store."""
    handle = next(iter(block.handles.values()), None)
    return handle if isinstance(handle, str) else None


def _select(data: DataProto, columns: Sequence[str]) -> DataProto:
    objects = [name for name in columns if name in data.non_tensor_batch]
    return data.select([name for name in columns if name not in objects], objects, [])


@cache
def this_node() -> str:
    """Id and address of this process's node."""
    import ray

    context = ray.get_runtime_context()
    return f"node {context.get_node_id()[:8]} ({ray.util.get_node_ip_address()})"
