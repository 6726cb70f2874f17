"""The data plane: batches that stay where they were made, and references to them.

A worker's batch is written to a `BlockStore` as a block: columns of some rows. The driver holds a `BatchRef`, which records
the block and row of each column of each of its rows, and passes it to workers, which fetch the columns that they declare.
So the driver's traffic grows with the number of samples and columns, never with their length. Two stores serve a run
(`ray.data_plane`): Ray objects (`ray_store.py`) and TransferQueue (`queue_store.py`). `DataPlane` keeps columns by sample
id, for programs of your own.

Invariant: what was written can be read, bit for bit and in any order, until nothing in the driver refers to it, or the
reader gets an error that names samples and node: nothing is lost silently. What is read may be shared with other readers,
so it must not be written to.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDict

from etude.errors import InfrastructureError
from etude.protocol import DataProto, object_array

SECONDS = 600.0  # timeout for reading samples
_RETRY_SECONDS = 10.0  # timeout of the retry that finds out which samples are lost
_MAX_NAMED = 3  # max. number of samples that an error names


class LostSamplesError(InfrastructureError):
    """Samples that were written can no longer be read; names them and the node that held them."""


@dataclass(frozen=True)
class Block:
    """Columns of some samples, written together. `handles`: the store's handle of each column; `objects`: the columns that
    are not tensors; `node`: where the data is, for error messages."""

    rows: int
    handles: Mapping[str, Any]
    objects: frozenset[str]
    node: str


class Piece(NamedTuple):
    """Columns of some rows of a block; `rows` None: all, in order."""

    block: Block
    columns: tuple[str, ...]
    rows: tuple[int, ...] | None


class BlockStore(ABC):
    """Stores blocks. A store is picklable: workers write to the store that the driver created."""

    @abstractmethod
    def write(self, data: DataProto) -> Block:
        """Stores the columns of `data`, which must not be empty; its meta_info is not stored."""

    @abstractmethod
    def read(self, pieces: Sequence[Piece], timeout: float) -> list[DataProto]:
        """Reads each piece as a batch.

        Raises:
            LookupError: a block is gone or did not arrive within `timeout` seconds; says why.
        """

    def watch(self, block: Block) -> None:  # noqa: B027  (blocks of memory and of Ray are counted anyway)
        """Called by the driver for each block: it is free once nothing in this process refers to it."""

    def sweep(self) -> None:  # noqa: B027
        """Frees the watched blocks that nothing refers to any more."""

    def close(self) -> None:  # noqa: B027
        """Stops what the store started."""


class InProcessStore(BlockStore):
    """Blocks in the memory of this process."""

    def write(self, data: DataProto) -> Block:
        columns = {**({} if data.batch is None else dict(data.batch.items())), **data.non_tensor_batch}
        return Block(len(data), columns, frozenset(data.non_tensor_batch), "this process")

    def read(self, pieces: Sequence[Piece], timeout: float) -> list[DataProto]:
        return [
            select_rows(DataProto.from_single_dict({name: block.handles[name] for name in columns}), rows)
            for block, columns, rows in pieces
        ]


@dataclass(frozen=True)
class Layout:
    """Where some columns of a batch are stored: for each row an index into `blocks`, and its row in that block."""

    names: frozenset[str]
    blocks: tuple[Block, ...]
    block: np.ndarray
    row: np.ndarray

    def take(self, places: np.ndarray) -> Layout:
        """The layout of the rows at `places`."""
        return replace(self, block=self.block[places], row=self.row[places])

    def pieces(self) -> tuple[list[np.ndarray], list[Piece]]:
        """Returns, for each block with rows, the positions of these rows, and the piece to read."""
        numbers = list(dict.fromkeys(self.block.tolist()))
        members, pieces = [np.flatnonzero(self.block == number) for number in numbers], []
        for number, places in zip(numbers, members):
            block, rows = self.blocks[number], tuple(self.row[places].tolist())
            columns = tuple(sorted(self.names & block.handles.keys()))
            pieces.append(Piece(block, columns, None if rows == tuple(range(block.rows)) else rows))
        return members, pieces

    def __getstate__(self) -> dict[str, Any]:
        """Without the blocks that no row is in, and their columns without those of other layouts."""
        numbers, block = np.unique(self.block, return_inverse=True)
        blocks = [self.blocks[number] for number in numbers.tolist()]
        kept = tuple(
            replace(each, handles={name: each.handles[name] for name in self.names & each.handles.keys()})
            for each in blocks
        )
        return {"names": self.names, "blocks": kept, "block": block, "row": self.row}


@dataclass(frozen=True)
class BatchRef:
    """A reference to a batch whose columns are in a store; the driver holds it, and sends it to workers, instead of a
    `DataProto`.

    It is restricted, chunked, concatenated and united like a `DataProto`, but nothing is read before `fetch`.
    """

    ids: np.ndarray  # (rows,) sample ids, for error messages
    layouts: tuple[Layout, ...]
    store: BlockStore
    timeout: float = SECONDS
    meta_info: dict[str, Any] = field(default_factory=dict)
    join: Callable[[list[DataProto]], DataProto] = DataProto.concat  # joins what is read from several blocks

    @classmethod
    def of(cls, data: DataProto, store: BlockStore, timeout: float = SECONDS) -> BatchRef:
        """Writes `data`, which must not be empty, to `store` and returns the reference."""
        uids = data.non_tensor_batch.get("uid")
        ids = object_array([str(row) for row in range(len(data))]) if uids is None else uids
        block, rows = store.write(data), np.arange(len(data))
        layout = Layout(frozenset(block.handles), (block,), np.zeros(len(data), dtype=np.int64), rows)
        return cls(ids, (layout,), store, timeout, dict(data.meta_info))

    def watched(self) -> BatchRef:
        """Has the store free the blocks once nothing in this process refers to them; returns itself."""
        for block in {id(block): block for layout in self.layouts for block in layout.blocks}.values():
            self.store.watch(block)
        return self

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def columns(self) -> frozenset[str]:
        """Names of all columns."""
        return frozenset(name for layout in self.layouts for name in layout.names)

    @property
    def objects(self) -> frozenset[str]:
        """Names of the columns that are not tensors."""
        blocks = ((layout.names, block) for layout in self.layouts for block in layout.blocks)
        return frozenset(name for names, block in blocks for name in names & block.objects)

    def restrict(self, columns: Iterable[str]) -> BatchRef:
        """Restricts the batch to those of `columns` that it has."""
        wanted = frozenset(columns)
        kept = (replace(layout, names=layout.names & wanted) for layout in self.layouts)
        return replace(self, layouts=tuple(layout for layout in kept if layout.names), meta_info=dict(self.meta_info))

    def select_idxs(self, idxs: Any) -> BatchRef:
        """Returns the rows that a boolean mask or row numbers select, in order."""
        chosen = np.asarray(idxs)
        places = np.arange(len(self))[chosen if chosen.size else slice(0)]
        layouts = tuple(layout.take(places) for layout in self.layouts)
        return replace(self, ids=self.ids[places], layouts=layouts, meta_info=dict(self.meta_info))

    def __getitem__(self, rows: slice) -> BatchRef:
        return self.select_idxs(np.arange(len(self))[rows])

    def chunk(self, chunks: int) -> list[BatchRef]:
        """Splits into equal parts, in order; see `DataProto.chunk`."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(f"{len(self)} rows cannot be divided into {chunks} equal chunks; pad them first")
        size = len(self) // chunks
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    def union(self, other: BatchRef) -> BatchRef:
        """Returns the batch with the columns and meta keys of `other` added, row by row.

        Raises:
            ValueError: unequal numbers of rows, or a column that both have; names it.
        """
        if len(self) != len(other):
            raise ValueError(f"cannot unite {len(self)} rows with {len(other)}")
        if both := self.columns & other.columns:
            raise ValueError(f"column '{min(both)}' is in both batches")
        join = self.join if other.join is DataProto.concat else other.join
        meta_info = other.meta_info | self.meta_info
        return replace(self, layouts=(*self.layouts, *other.layouts), meta_info=meta_info, join=join)

    @staticmethod
    def concat(parts: Sequence[BatchRef], join: Callable[[list[DataProto]], DataProto] | None = None) -> BatchRef:
        """Concatenates the rows of all parts, in order, and merges `meta_info` as `DataProto.concat` does. With `join`,
        which combines the batches that are read, parts may lack columns that others have.

        Raises:
            ValueError: no parts, or, without `join`, parts with different columns.
        """
        if not parts or (join is None and len({part.columns for part in parts}) > 1):
            raise ValueError(f"parts with the same columns are joined, not {[sorted(part.columns) for part in parts]}")
        groups: dict[tuple[int, ...], tuple[list[str], list[Layout]]] = {}
        for name in sorted(frozenset[str]().union(*(part.columns for part in parts))):
            sources = [
                next((layout for layout in part.layouts if name in layout.names), part.layouts[0]) for part in parts
            ]
            groups.setdefault(tuple(map(id, sources)), ([], sources))[0].append(name)
        layouts = []
        for names, sources in groups.values():
            starts = np.cumsum([0, *(len(layout.blocks) for layout in sources)])
            block = np.concatenate([layout.block + start for layout, start in zip(sources, starts)])
            blocks = tuple(block for layout in sources for block in layout.blocks)
            layouts.append(Layout(frozenset(names), blocks, block, np.concatenate([layout.row for layout in sources])))
        meta_info = DataProto.concat([DataProto(meta_info=part.meta_info) for part in parts]).meta_info
        ids = np.concatenate([part.ids for part in parts])
        join = join or parts[0].join
        return replace(parts[0], ids=ids, layouts=tuple(layouts), meta_info=meta_info, join=join)

    def fetch(self) -> DataProto:
        """Reads the batch. Its tensors may be in memory shared with other readers: they must not be written to.

        Raises:
            LostSamplesError: the process or node that holds some samples is gone or did not answer in time.
        """
        whole = DataProto()
        for layout in self.layouts if len(self) else ():
            part = self._read(layout)
            whole = whole.union(part) if whole.non_tensor_batch or whole.batch is not None else part
        whole.meta_info = DataProto(meta_info=self.meta_info)[:].meta_info
        return whole

    def _readable(self, piece: Piece) -> bool:
        try:
            self.store.read([piece], min(self.timeout, _RETRY_SECONDS))
        except LookupError:
            return False
        return True

    def _read(self, layout: Layout) -> DataProto:
        members, pieces = layout.pieces()
        try:
            found = iter(self.store.read([piece for piece in pieces if piece.columns], self.timeout))
        except LookupError as error:
            lost = [i for i, piece in enumerate(pieces) if not self._readable(piece)] or range(len(pieces))
            ids = self.ids[np.sort(np.concatenate([members[i] for i in lost]))]
            nodes = ", ".join(sorted({pieces[i].block.node for i in lost}))
            raise LostSamplesError(f"{_name_samples(ids)}, held by {nodes}, cannot be read: {error}") from error
        parts = [
            next(found) if piece.columns else DataProto(TensorDict({}, batch_size=[len(places)]))
            for piece, places in zip(pieces, members)
        ]
        whole = parts[0] if len(parts) == 1 else self.join(parts)
        places = np.concatenate(members)
        return whole if (places == np.arange(len(places))).all() else whole.select_idxs(np.argsort(places))


class DataPlane:
    """Stores columns by sample id, in `store` (default: the memory of this process). Thread-safe.

    Invariant: a column of a sample is put once, and can be read until the sample is evicted.
    """

    def __init__(self, store: BlockStore | None = None, *, timeout: float = SECONDS) -> None:
        self.store, self.timeout = store or InProcessStore(), timeout
        self._lock = threading.Lock()
        self._samples: dict[str, dict[str, tuple[Block, int]]] = {}  # id → column → its block and row

    def put(self, ids: Sequence[str], data: DataProto | BatchRef) -> None:
        """Adds the columns of `data`, one row per id, to these samples. A reference is one that a worker wrote to the store.

        Raises:
            ValueError: ids are repeated, their number differs from that of the rows, or a sample already has a column.
        """
        if len(ids) != len(data) or len(set(ids)) != len(ids):
            raise ValueError(f"{len(set(ids))} different sample ids for {len(data)} rows")
        if not len(data):
            return
        with self._lock:
            self._check_new(ids, data.columns)
        ref = (BatchRef.of(data, self.store, self.timeout) if isinstance(data, DataProto) else data).watched()
        with self._lock:
            self._check_new(ids, ref.columns)  # another thread may have put them meanwhile
            for layout in ref.layouts:
                for sample, number, row in zip(ids, layout.block.tolist(), layout.row.tolist()):
                    columns = self._samples.setdefault(sample, {})
                    columns.update(dict.fromkeys(layout.names, (layout.blocks[number], row)))

    def refer(
        self, ids: Sequence[str], columns: Iterable[str] | None = None, meta_info: Mapping[str, Any] | None = None
    ) -> BatchRef:
        """Returns a reference to `columns` (None: all) of samples, in the order of `ids`, which may repeat; with empty
        `columns` there is nothing to fetch.

        Raises:
            KeyError: a sample is unknown or evicted, or lacks a requested column or one that another sample has; names it.
        """
        with self._lock:
            if unknown := [sample for sample in ids if sample not in self._samples]:
                raise KeyError(f"the data plane has no {_name_samples(unknown)} (evicted, or never put)")
            found = [self._samples[sample] for sample in ids]
            names = set(columns) if columns is not None else {name for each in found for name in each}
            for sample, each in zip(ids, found):
                if lacks := names - each.keys():
                    raise KeyError(f"sample '{sample}' has no column '{min(lacks)}' in the data plane")
            groups: dict[tuple[tuple[int, int], ...], list[str]] = {}  # columns that are stored alike share a layout
            for name in sorted(names):
                groups.setdefault(tuple((id(each[name][0]), each[name][1]) for each in found), []).append(name)
            layouts = []
            for alike in groups.values() if found else ():
                places = [each[alike[0]] for each in found]
                blocks = {id(block): block for block, _ in places}
                order = {key: number for number, key in enumerate(blocks)}
                block, row = (np.array(each) for each in zip(*((order[id(block)], row) for block, row in places)))
                layouts.append(Layout(frozenset(alike), tuple(blocks.values()), block, row))
        return BatchRef(object_array(list(ids)), tuple(layouts), self.store, self.timeout, dict(meta_info or {}))

    def get(self, ids: Sequence[str], columns: Iterable[str] | None = None) -> DataProto:
        """Reads the samples as a batch; see `refer` and `BatchRef.fetch`."""
        return self.refer(ids, columns).fetch()

    def evict(self, ids: Iterable[str]) -> None:
        """Evicts samples; a block is freed with its last sample. Raises KeyError, and evicts nothing, if one is unknown."""
        with self._lock:
            chosen = dict.fromkeys(ids)
            if unknown := [sample for sample in chosen if sample not in self._samples]:
                raise KeyError(f"the data plane has no {_name_samples(unknown)}")
            for sample in chosen:
                del self._samples[sample]
        self.store.sweep()

    def __len__(self) -> int:
        return len(self._samples)

    def close(self) -> None:
        """Evicts everything and closes the store."""
        self.evict(list(self._samples))
        self.store.close()

    def _check_new(self, ids: Sequence[str], columns: Iterable[str]) -> None:
        new = set(columns)
        for sample in ids:
            if again := new & self._samples.get(sample, {}).keys():
                raise ValueError(f"sample '{sample}' has a column '{min(again)}' already")


def map_batches(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Applies `function` to every instance of `kind` in `value`, also inside lists, tuples, dictionaries and iterators."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: map_batches(each, kind, function) for key, each in value.items()}
    if type(value) is tuple:
        return tuple(map_batches(each, kind, function) for each in value)
    return [map_batches(each, kind, function) for each in value] if isinstance(value, list | Iterator) else value


def keep_batches(value: Any, store: BlockStore) -> Any:
    """Writes every non-empty batch in a result to `store` and puts a reference in its place."""
    return map_batches(value, DataProto, lambda data: BatchRef.of(data, store) if len(data) else data)


Fetched = list[tuple[DataProto, dict[str, int]]]
"""Fetched batches with PyTorch's version counters of their tensors."""


def fetch_batches(value: Any, fetched: Fetched) -> Any:
    """Replaces every reference in an argument by its batch, and adds that batch to `fetched`."""

    def fetch(ref: BatchRef) -> DataProto:
        data = ref.fetch()
        tensors = {} if data.batch is None else dict(data.batch.items())
        fetched.append((data, {name: tensor._version for name, tensor in tensors.items()}))
        return data[:]

    return map_batches(value, BatchRef, fetch)


def check_unwritten(fetched: Fetched, method: str) -> None:
    """Raises RuntimeError if a tensor of these batches was modified since: other readers share the memory."""
    for data, versions in fetched:
        for name, version in versions.items():
            if data.batch[name]._version != version:
                raise RuntimeError(f"{method} wrote into the column '{name}', which it only may read")


def select_rows(data: DataProto, rows: Sequence[int] | None) -> DataProto:
    """Returns the rows (None: all), as a view if they are adjacent."""
    if rows is None:
        return data
    first, last = rows[0], rows[-1]
    if last - first + 1 == len(rows) and all(row == first + i for i, row in enumerate(rows)):
        return data[first : last + 1]
    return data.select_idxs(rows)


def _name_samples(ids: Sequence[str] | np.ndarray) -> str:
    named = ", ".join(f"'{sample}'" for sample in ids[:_MAX_NAMED])
    return f"sample{'s' if len(ids) > 1 else ''} {named}" + (
        f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
    )
