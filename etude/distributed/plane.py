"""`DataPlane`: where the columns of samples are kept between two workers, by sample id.

The driver holds the plane: which block of which store has a sample's columns, and how many bytes there are. The data stay
with the store: in this process (`InProcessStore`), as plain Ray objects on the node that made them (`ray_store.py`), or in
TransferQueue (`queue_store.py`). A batch crosses to a worker as a `BatchRef`, which the worker fetches there; what a
worker wrote crosses back as a `Block`, which the plane adopts. So what the driver sends and receives grows with the number
of samples and columns, never with their length.

Invariant: a column of a sample is written once. What was put and not evicted can be read, or its reader gets an error that
names samples and node: nothing is lost in silence. A reader gets the rows in the order it asks for, bit for bit, whatever
blocks they came in; they may be shared with other readers, so they must not be written to.
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

SECONDS = 600.0  # to read samples, or to get room for them
_SECOND_TRY = 10.0  # to find out which of several samples are lost
_NAMED = 3  # samples that an error names


class LostSamplesError(InfrastructureError):
    """Samples that were put, and not evicted, can no longer be read; names them and the node that held them."""


class PlaneFullError(InfrastructureError):
    """There was no room in the plane in time; names its limit and what it holds."""


@dataclass(frozen=True)
class Block:
    """Columns of some samples, written at once. `handles`: by column, what its store reads it by; `objects`: columns that
    are no tensors; `node`: who holds it."""

    rows: int
    handles: Mapping[str, Any]
    objects: frozenset[str]
    nbytes: int
    node: str


class Piece(NamedTuple):
    """Columns of some rows of a block; `rows` None: all, in their order."""

    block: Block
    columns: tuple[str, ...]
    rows: tuple[int, ...] | None


class BlockStore(ABC):
    """Keeps blocks. A store is picklable: workers write to the store that the driver made."""

    @abstractmethod
    def write(self, data: DataProto) -> Block:
        """Keeps the columns of `data`, which has rows; its meta_info is not kept."""

    @abstractmethod
    def read(self, pieces: Sequence[Piece], timeout: float) -> list[DataProto]:
        """The pieces, each as a batch.

        Raises:
            LookupError: a block is gone, or did not come within `timeout` seconds; says why.
        """

    @abstractmethod
    def drop(self, block: Block) -> None:
        """Frees a block, of which no piece is read any more."""

    def close(self) -> None:  # noqa: B027  (a store may have nothing to end)
        """Ends what the store started."""


class InProcessStore(BlockStore):
    """Blocks in the memory of this process."""

    def write(self, data: DataProto) -> Block:
        columns = {**({} if data.batch is None else dict(data.batch.items())), **data.non_tensor_batch}
        return Block(len(data), columns, frozenset(data.non_tensor_batch), tensor_bytes(data), "this process")

    def read(self, pieces: Sequence[Piece], timeout: float) -> list[DataProto]:
        found = []
        for block, columns, rows in pieces:
            data = DataProto.from_single_dict({name: block.handles[name] for name in columns})
            found.append(select_rows(data, rows))
        return found

    def drop(self, block: Block) -> None:
        """Nothing to do: the block was the only one to hold its columns."""


@dataclass(frozen=True)
class Layout:
    """Where some columns of a batch are: of each sample the block, a number into `blocks`, and its row there."""

    names: frozenset[str]
    blocks: tuple[Block, ...]
    block: np.ndarray
    row: np.ndarray

    def take(self, places: np.ndarray) -> Layout:
        """Of samples at `places`."""
        return replace(self, block=self.block[places], row=self.row[places])

    def pieces(self) -> tuple[list[np.ndarray], list[Piece]]:
        """What is read of each block that has samples, and these samples' places."""
        numbers = list(dict.fromkeys(self.block.tolist()))
        members, pieces = [np.flatnonzero(self.block == number) for number in numbers], []
        for number, places in zip(numbers, members):
            block, rows = self.blocks[number], tuple(self.row[places].tolist())
            columns = tuple(sorted(self.names & block.handles.keys()))
            pieces.append(Piece(block, columns, None if rows == tuple(range(block.rows)) else rows))
        return members, pieces


@dataclass(frozen=True)
class BatchRef:
    """A batch whose columns are in a store: what the driver has in place of a `DataProto`, and what a worker is sent.

    Rows and columns are selected, joined and united as those of a `DataProto`, but nothing is read before `fetch`.
    """

    ids: np.ndarray  # (rows,) names of the samples, for errors
    layouts: tuple[Layout, ...]
    store: BlockStore
    timeout: float = SECONDS
    meta_info: dict[str, Any] = field(default_factory=dict)
    join: Callable[[list[DataProto]], DataProto] = DataProto.concat  # of what several blocks hold

    @classmethod
    def of(cls, data: DataProto, store: BlockStore, timeout: float = SECONDS) -> BatchRef:
        """`data`, which has rows, written to `store`."""
        uids = data.non_tensor_batch.get("uid")
        ids = object_array([str(row) for row in range(len(data))]) if uids is None else uids
        block, rows = store.write(data), np.arange(len(data))
        layout = Layout(frozenset(block.handles), (block,), np.zeros(len(data), dtype=np.int64), rows)
        return cls(ids, (layout,), store, timeout, dict(data.meta_info))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def columns(self) -> frozenset[str]:
        """Names of tensors and objects."""
        return frozenset(name for layout in self.layouts for name in layout.names)

    @property
    def objects(self) -> frozenset[str]:
        """Those that are no tensors."""
        blocks = ((layout.names, block) for layout in self.layouts for block in layout.blocks)
        return frozenset(name for names, block in blocks for name in names & block.objects)

    def select(self, columns: Iterable[str]) -> BatchRef:
        """Those of `columns` that there are."""
        wanted = frozenset(columns)
        kept = (replace(layout, names=layout.names & wanted) for layout in self.layouts)
        return replace(self, layouts=tuple(layout for layout in kept if layout.names), meta_info=dict(self.meta_info))

    def select_idxs(self, idxs: Any) -> BatchRef:
        """The rows of a boolean mask, or of integers in their order."""
        chosen = np.asarray(idxs)
        places = np.arange(len(self))[chosen if chosen.size else slice(0)]
        layouts = tuple(layout.take(places) for layout in self.layouts)
        return replace(self, ids=self.ids[places], layouts=layouts, meta_info=dict(self.meta_info))

    def __getitem__(self, rows: slice) -> BatchRef:
        return self.select_idxs(np.arange(len(self))[rows])

    def chunk(self, chunks: int) -> list[BatchRef]:
        """Equal parts, in order; see `DataProto.chunk`."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(f"{len(self)} rows cannot be divided into {chunks} equal chunks; pad them first")
        size = len(self) // chunks
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    def union(self, other: BatchRef) -> BatchRef:
        """With the columns and meta keys of `other`, row by row.

        Raises:
            ValueError: unequal numbers of rows, or a column of both; names it.
        """
        if len(self) != len(other):
            raise ValueError(f"cannot unite {len(self)} rows with {len(other)}")
        if both := self.columns & other.columns:
            raise ValueError(f"column '{min(both)}' is in both batches")
        return replace(self, layouts=(*self.layouts, *other.layouts), meta_info=other.meta_info | self.meta_info)

    @staticmethod
    def concat(parts: Sequence[BatchRef], join: Callable[[list[DataProto]], DataProto] | None = None) -> BatchRef:
        """The rows of all parts, in order. `meta_info` is merged as `DataProto.concat` does. With `join`, which is given
        what was read, parts may lack columns that others have.

        Raises:
            ValueError: no parts, or without `join` parts that differ in columns.
        """
        if not parts or (join is None and len({part.columns for part in parts}) > 1):
            raise ValueError(f"parts with the same columns are joined, not {[sorted(part.columns) for part in parts]}")
        groups: dict[tuple[int, ...], tuple[list[str], list[Layout]]] = {}
        for name in sorted(frozenset[str]().union(*(part.columns for part in parts))):
            found = [
                next((layout for layout in part.layouts if name in layout.names), part.layouts[0]) for part in parts
            ]
            groups.setdefault(tuple(map(id, found)), ([], found))[0].append(name)
        layouts = []
        for names, found in groups.values():
            starts = np.cumsum([0, *(len(layout.blocks) for layout in found)])
            block = np.concatenate([layout.block + start for layout, start in zip(found, starts)])
            blocks = tuple(block for layout in found for block in layout.blocks)
            layouts.append(Layout(frozenset(names), blocks, block, np.concatenate([layout.row for layout in found])))
        meta_info = DataProto.concat([DataProto(meta_info=part.meta_info) for part in parts]).meta_info
        ids = np.concatenate([part.ids for part in parts])
        join = join or parts[0].join
        return replace(parts[0], ids=ids, layouts=tuple(layouts), meta_info=meta_info, join=join)

    def fetch(self) -> DataProto:
        """The batch. Its tensors may lie in memory shared with other readers: they must not be written to.

        Raises:
            LostSamplesError: a holder of samples has gone, or did not answer in time.
        """
        whole = DataProto()
        for layout in self.layouts if len(self) else ():
            found = self._read(layout)
            whole = whole.union(found) if whole.non_tensor_batch or whole.batch is not None else found
        whole.meta_info = DataProto(meta_info=self.meta_info)[:].meta_info
        return whole

    def _readable(self, piece: Piece) -> bool:
        try:
            self.store.read([piece], min(self.timeout, _SECOND_TRY))
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
            raise LostSamplesError(f"{_count(ids)}, held by {nodes}, cannot be read: {error}") from error
        whole = parts[0] if len(parts) == 1 else self.join(parts)
        places = np.concatenate(members)
        return whole if (places == np.arange(len(places))).all() else whole.select_idxs(np.argsort(places))


@dataclass
class _Held:
    """A block of the plane, and how many of its samples are not evicted."""

    block: Block
    live: int


class DataPlane:
    """Columns by sample id, in a store. Thread-safe.

    `max_bytes` bounds what it holds (None: no limit): a `put` for which there is no room waits until others are evicted.
    """

    def __init__(
        self, store: BlockStore | None = None, *, max_bytes: int | None = None, timeout: float = 600.0
    ) -> None:
        self.store, self.max_bytes, self.timeout = store or InProcessStore(), max_bytes, timeout
        self.nbytes = 0
        self._room = threading.Condition()
        self._blocks: dict[int, _Held] = {}
        self._samples: dict[str, list[tuple[int, int]]] = {}  # id → (block, row) of each of its blocks
        self._numbers = itertools.count()

    def put(self, ids: Sequence[str], data: DataProto) -> None:
        """Adds the columns of `data`, a row for each of `ids`, to what is known of these samples.

        Raises:
            ValueError: ids are repeated or not as many as rows, or a sample has a column already; names them.
            PlaneFullError: no room within the plane's timeout, or more than it can ever hold.
        """
        if len(ids) != len(data):
            raise ValueError(f"{len(ids)} sample ids for {len(data)} rows")
        if not len(data):
            return
        nbytes = tensor_bytes(data)
        with self._room:
            self._check_new(ids, columns_of(data))
            self.wait_for_room(nbytes)
            self.nbytes += nbytes  # reserved: others may put while this one is written
        block = None
        try:
            block = self.store.write(data)
        finally:
            # Nobody sees the reservation and the block counted together, or a failed write's room taken.
            with self._room:
                self.nbytes -= nbytes
                if block is None:
                    self._room.notify_all()
                else:
                    self.adopt(ids, block)

    def adopt(self, ids: Sequence[str], block: Block) -> None:
        """Adds a block that a worker has written, a row for each of `ids`; see `put`. It never waits: the data are there."""
        with self._room:
            self._check_new(ids, block.handles.keys())
            number = next(self._numbers)
            self._blocks[number] = _Held(block, len(ids))
            self.nbytes += block.nbytes
            for row, sample in enumerate(ids):
                self._samples.setdefault(sample, []).append((number, row))

    def wait_for_room(self, nbytes: int = 0) -> None:
        """Waits until `nbytes` more fit; at least until the plane is within its limit.

        Raises:
            PlaneFullError: not within the plane's timeout, or more than it can ever hold.
        """
        limit = self.max_bytes
        if limit is None:
            return
        if nbytes > limit:
            raise PlaneFullError(f"a batch of {nbytes:,} bytes does not fit into a data plane of {limit:,}")
        with self._room:  # reentrant: `put` reserves before it lets go
            if not self._room.wait_for(lambda: self.nbytes + nbytes <= limit, self.timeout):
                raise PlaneFullError(
                    f"no room for {nbytes:,} bytes within {self.timeout:g} s: the data plane holds {self.nbytes:,} of "
                    f"{limit:,} bytes, of {len(self._samples)} samples that nobody has evicted"
                )

    def refer(
        self, ids: Sequence[str], columns: Iterable[str] | None = None, meta_info: Mapping[str, Any] | None = None
    ) -> BatchRef:
        """A reference to `columns` (None: all) of samples, which may be repeated, in the order of `ids`; without
        columns it has no rows to fetch.

        Raises:
            KeyError: an unknown or evicted sample, or one without a column that is wanted, or that another has; names it.
        """
        wanted = None if columns is None else frozenset(columns)
        places: dict[str, tuple[list[int], list[int]]] = {}  # column → numbers of the blocks, and rows, so far
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
        """The samples as a batch; see `refer` and `BatchRef.fetch`."""
        return self.refer(ids, columns).fetch()

    def evict(self, ids: Iterable[str]) -> None:
        """Forgets samples; a block is freed with its last one. Raises KeyError for an unknown one, and evicts none then."""
        with self._room:
            chosen = dict.fromkeys(ids)
            if unknown := [sample for sample in chosen if sample not in self._samples]:
                raise KeyError(f"the data plane has no {_count(unknown)}")
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
        """Evicts everything and ends the store."""
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
    """`value` with `function` applied to every batch or reference in it that is a `kind`; lists, tuples, dictionaries and
    iterators are looked through."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: map_batches(each, kind, function) for key, each in value.items()}
    if type(value) is tuple:
        return tuple(map_batches(each, kind, function) for each in value)
    return [map_batches(each, kind, function) for each in value] if isinstance(value, list | Iterator) else value


def keep_batches(value: Any, store: BlockStore) -> Any:
    """A result with every batch in it that has rows written to `store`, and references in their place."""
    return map_batches(value, DataProto, lambda data: BatchRef.of(data, store) if len(data) else data)


Fetched = list[tuple[DataProto, dict[str, int]]]
"""Batches with the versions that PyTorch counts of their tensors."""


def fetch_batches(value: Any, fetched: Fetched) -> Any:
    """An argument with every reference in it replaced by its batch, which is added to `fetched`."""

    def fetch(ref: BatchRef) -> DataProto:
        data = ref.fetch()
        tensors = {} if data.batch is None else dict(data.batch.items())
        fetched.append((data, {name: tensor._version for name, tensor in tensors.items()}))
        return data[:]

    return map_batches(value, BatchRef, fetch)


def check_unwritten(fetched: Fetched, method: str) -> None:
    """Raises RuntimeError if a tensor of these batches was written to since: others read the same memory."""
    for data, versions in fetched:
        for name, version in versions.items():
            if data.batch[name]._version != version:
                raise RuntimeError(f"{method} wrote into the column '{name}', which it only may read")


def select_rows(data: DataProto, rows: Sequence[int] | None) -> DataProto:
    """The rows: a view where they are adjacent."""
    if rows is None:
        return data
    first, last = rows[0], rows[-1]
    if last - first + 1 == len(rows) and all(row == first + i for i, row in enumerate(rows)):
        return data[first : last + 1]
    return data.select_idxs(rows)


def tensor_bytes(data: DataProto) -> int:
    """Bytes of the tensors: what counts against a plane's limit."""
    return 0 if data.batch is None else sum(tensor.nbytes for tensor in data.batch.values())


def columns_of(data: DataProto) -> list[str]:
    """Names of its tensors and objects."""
    return [*(() if data.batch is None else data.batch.keys()), *data.non_tensor_batch]


def _count(ids: Sequence[str] | np.ndarray) -> str:
    named = ", ".join(f"'{sample}'" for sample in ids[:_NAMED])
    return f"sample{'s' if len(ids) > 1 else ''} {named}" + (
        f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    )
