"""`DataPlane`: keeps the columns of samples, by sample id, between the workers that write and read them.

The driver holds the plane, which is metadata only: which block of which store has a sample's columns, and the total size.
The data stay in the store: in this process (`InProcessStore`), as Ray objects on the node that produced them
(`ray_store.py`), or in TransferQueue (`queue_store.py`). A batch is sent to a worker as a `BatchRef`, which the worker
fetches; what a worker wrote comes back as a `Block`, which the plane adopts. So the driver's traffic grows with the number
of samples and columns, never with their length.

Invariant: a column of a sample is written once. What was put and not evicted can be read, or the reader gets an error that
names samples and node: nothing is lost silently. A reader gets the rows in the order it asks for, bit for bit, whatever
blocks hold them; they may be shared with other readers, so they must not be written to.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from etude.errors import InfrastructureError
from etude.protocol import DataProto, object_array

SECONDS = 600.0  # timeout for reading samples, or for waiting for room
_RETRY_SECONDS = 10.0  # timeout of the retry that finds out which samples are lost
_MAX_NAMED = 3  # max. number of samples that an error names


class LostSamplesError(InfrastructureError):
    """Samples that were put and not evicted can no longer be read; names them and the node that held them."""


class PlaneFullError(InfrastructureError):
    """The data plane had no room within the timeout; names its limit and what it holds."""


@dataclass(frozen=True)
class Block:
    """Columns of some samples, written together. `handles`: the store's handle of each column; `objects`: the columns that
    are not tensors; `node`: where the data is, for error messages."""

    rows: int
    handles: Mapping[str, Any]
    objects: frozenset[str]
    nbytes: int
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

    @abstractmethod
    def drop(self, block: Block) -> None:
        """Frees a block that nothing reads any more."""

    def close(self) -> None:  # noqa: B027  (a store may have nothing to close)
        """Stops what the store started."""


class InProcessStore(BlockStore):
    """Blocks in the memory of this process."""

    def write(self, data: DataProto) -> Block:
        columns = {**({} if data.batch is None else dict(data.batch.items())), **data.non_tensor_batch}
        return Block(len(data), columns, frozenset(data.non_tensor_batch), tensor_bytes(data), "this process")

    def read(self, pieces: Sequence[Piece], timeout: float) -> list[DataProto]:
        batches = []
        for block, columns, rows in pieces:
            data = DataProto.from_single_dict({name: block.handles[name] for name in columns})
            batches.append(select_rows(data, rows))
        return batches

    def drop(self, block: Block) -> None:
        """Does nothing: the columns are freed with the block."""


@dataclass(frozen=True)
class Layout:
    """Where some columns of a batch are stored: for each sample an index into `blocks`, and its row in that block."""

    names: frozenset[str]
    blocks: tuple[Block, ...]
    block: np.ndarray
    row: np.ndarray

    def take(self, places: np.ndarray) -> Layout:
        """The layout of the samples at `places`."""
        return replace(self, block=self.block[places], row=self.row[places])

    def pieces(self) -> tuple[list[np.ndarray], list[Piece]]:
        """Returns, for each block with samples, the positions of these samples, and the piece to read."""
        numbers = list(dict.fromkeys(self.block.tolist()))
        members, pieces = [np.flatnonzero(self.block == number) for number in numbers], []
        for number, places in zip(numbers, members):
            block, rows = self.blocks[number], tuple(self.row[places].tolist())
            columns = tuple(sorted(self.names & block.handles.keys()))
            pieces.append(Piece(block, columns, None if rows == tuple(range(block.rows)) else rows))
        return members, pieces


@dataclass(frozen=True)
class BatchRef:
    """A reference to a batch whose columns are in a store; the driver holds it, and sends it to workers, instead of a
    `DataProto`.

    It is selected, chunked, concatenated and united like a `DataProto`, but nothing is read before `fetch`.
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

    def select(self, columns: Iterable[str]) -> BatchRef:
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
        return replace(self, layouts=(*self.layouts, *other.layouts), meta_info=other.meta_info | self.meta_info)

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
            parts = self.store.read(pieces, self.timeout)
        except LookupError as error:
            lost = [i for i, piece in enumerate(pieces) if not self._readable(piece)] or range(len(pieces))
            ids = self.ids[np.sort(np.concatenate([members[i] for i in lost]))]
            nodes = ", ".join(sorted({pieces[i].block.node for i in lost}))
            raise LostSamplesError(f"{_name_samples(ids)}, held by {nodes}, cannot be read: {error}") from error
        whole = parts[0] if len(parts) == 1 else self.join(parts)
        places = np.concatenate(members)
        return whole if (places == np.arange(len(places))).all() else whole.select_idxs(np.argsort(places))


@dataclass
class _StoredBlock:
    """A block in the plane, and how many of its samples have not been evicted."""

    block: Block
    live: int


class DataPlane:
    """Stores columns by sample id. Thread-safe.

    `max_bytes` limits its size (None: no limit): a `put` for which there is no room waits until other samples are evicted.
    """

    def __init__(
        self, store: BlockStore | None = None, *, max_bytes: int | None = None, timeout: float = 600.0
    ) -> None:
        self.store, self.max_bytes, self.timeout = store or InProcessStore(), max_bytes, timeout
        self.nbytes = 0
        self._room = threading.Condition()
        self._blocks: dict[int, _StoredBlock] = {}
        self._samples: dict[str, list[tuple[int, int]]] = {}  # id → (block, row) of each of its blocks
        self._numbers = itertools.count()

    def put(self, ids: Sequence[str], data: DataProto) -> None:
        """Adds the columns of `data`, one row per id, to these samples.

        Raises:
            ValueError: ids are repeated, their number differs from that of the rows, or a sample already has a column.
            PlaneFullError: no room within the plane's timeout, or more than the plane can ever hold.
        """
        if len(ids) != len(data):
            raise ValueError(f"{len(ids)} sample ids for {len(data)} rows")
        if not len(data):
            return
        nbytes = tensor_bytes(data)
        with self._room:
            self._check_new(ids, columns_of(data))
            self.wait_for_room(nbytes)
            self.nbytes += nbytes  # reserved: other threads may put while this block is written
        block = None
        try:
            block = self.store.write(data)
        finally:
            # Under the lock, so that no thread sees reservation and block both counted, or a failed write's room as taken.
            with self._room:
                self.nbytes -= nbytes
                if block is None:
                    self._room.notify_all()
                else:
                    self.adopt(ids, block)

    def adopt(self, ids: Sequence[str], block: Block) -> None:
        """Adds a block that a worker has written, one row per id; see `put`. Never waits: the data already exist."""
        with self._room:
            self._check_new(ids, block.handles.keys())
            number = next(self._numbers)
            self._blocks[number] = _StoredBlock(block, len(ids))
            self.nbytes += block.nbytes
            for row, sample in enumerate(ids):
                self._samples.setdefault(sample, []).append((number, row))

    def wait_for_room(self, nbytes: int = 0) -> None:
        """Waits until `nbytes` more fit; with 0, until the plane is within its limit.

        Raises:
            PlaneFullError: not within the plane's timeout, or more than the plane can ever hold.
        """
        limit = self.max_bytes
        if limit is None:
            return
        if nbytes > limit:
            raise PlaneFullError(f"a batch of {nbytes:,} bytes does not fit into a data plane of {limit:,}")
        with self._room:  # reentrant: `put` calls this with the lock held
            if not self._room.wait_for(lambda: self.nbytes + nbytes <= limit, self.timeout):
                raise PlaneFullError(
                    f"no room for {nbytes:,} bytes within {self.timeout:g} s: the data plane holds {self.nbytes:,} of "
                    f"{limit:,} bytes, of {len(self._samples)} samples that nobody has evicted"
                )

    def refer(
        self, ids: Sequence[str], columns: Iterable[str] | None = None, meta_info: Mapping[str, Any] | None = None
    ) -> BatchRef:
        """Returns a reference to `columns` (None: all) of samples, in the order of `ids`, which may repeat; with empty
        `columns` there is nothing to fetch.

        Raises:
            KeyError: a sample is unknown or evicted, or lacks a requested column or one that another sample has; names it.
        """
        wanted = None if columns is None else frozenset(columns)
        places: dict[str, tuple[list[int], list[int]]] = {}  # column → block number and row of each sample so far
        with self._room:
            for count, sample in enumerate(ids):
                if sample not in self._samples:
                    raise KeyError(f"the data plane has no sample '{sample}' (evicted, or never put)")
                for number, row in self._samples[sample]:
                    for name in self._blocks[number].block.handles:
                        if wanted is None or name in wanted:
                            numbers, rows = places.setdefault(name, ([], []))
                            numbers.append(number)
                            rows.append(row)
                lacks = {name for name, (numbers, _) in places.items() if len(numbers) <= count} | (
                    wanted or set()
                ) - places.keys()
                if lacks:
                    raise KeyError(f"sample '{sample}' has no column '{min(lacks)}' in the data plane")
            held = {number: self._blocks[number].block for numbers, _ in places.values() for number in numbers}
        groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
        for name, (numbers, rows) in places.items():
            groups.setdefault((tuple(numbers), tuple(rows)), []).append(name)
        order = {number: i for i, number in enumerate(held)}
        layouts = tuple(
            Layout(frozenset(names), tuple(held.values()), np.array([order[each] for each in numbers]), np.array(rows))
            for (numbers, rows), names in groups.items()
        )
        return BatchRef(object_array(list(ids)), layouts, self.store, self.timeout, dict(meta_info or {}))

    def get(self, ids: Sequence[str], columns: Iterable[str] | None = None) -> DataProto:
        """Reads the samples as a batch; see `refer` and `BatchRef.fetch`."""
        return self.refer(ids, columns).fetch()

    def evict(self, ids: Iterable[str]) -> None:
        """Evicts samples; a block is freed with its last sample. Raises KeyError, and evicts nothing, if one is unknown."""
        with self._room:
            chosen = dict.fromkeys(ids)
            if unknown := [sample for sample in chosen if sample not in self._samples]:
                raise KeyError(f"the data plane has no {_name_samples(unknown)}")
            for sample in chosen:
                for number, _ in self._samples.pop(sample):
                    held = self._blocks[number]
                    held.live -= 1
                    if not held.live:
                        self.nbytes -= held.block.nbytes
                        del self._blocks[number]
                        self.store.drop(held.block)
            self._room.notify_all()

    def __len__(self) -> int:
        return len(self._samples)

    def close(self) -> None:
        """Evicts everything and closes the store."""
        self.evict(list(self._samples))
        self.store.close()

    def _check_new(self, ids: Sequence[str], columns: Iterable[str]) -> None:
        if len(set(ids)) != len(ids):
            raise ValueError("sample ids are repeated")
        new = set(columns)
        seen: set[tuple[int, ...]] = set()
        for sample in ids:
            numbers = tuple(number for number, _ in self._samples.get(sample, ()))
            if numbers not in seen:
                seen.add(numbers)
                for number in numbers:
                    if again := new & self._blocks[number].block.handles.keys():
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


def tensor_bytes(data: DataProto) -> int:
    """Bytes of the tensors, which count against a plane's limit."""
    return 0 if data.batch is None else sum(tensor.nbytes for tensor in data.batch.values())


def columns_of(data: DataProto) -> list[str]:
    """Names of the tensor and object columns."""
    return [*(() if data.batch is None else data.batch.keys()), *data.non_tensor_batch]


def _name_samples(ids: Sequence[str] | np.ndarray) -> str:
    named = ", ".join(f"'{sample}'" for sample in ids[:_MAX_NAMED])
    return f"sample{'s' if len(ids) > 1 else ''} {named}" + (
        f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
    )
