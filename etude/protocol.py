"""`DataProto`: the batch that controller and workers exchange.

It has three parts: `batch`, a TensorDict with one batch dimension; `non_tensor_batch`, object arrays with one entry per row;
`meta_info`, settings of the whole batch.

Invariant: every column, tensor or object, has as many rows as the batch, and no two batches share a `meta_info` or a
container inside one. All row selection (slices, chunks, repetition, padding) goes through `_rows` and follows one rule: a
slice is a view of the tensors, an index copies them, the objects in a row are shared. Padding always means
`pad_dataproto_to_divisor`. Misuse raises a ValueError that names the column, the key or the sizes.

Sending rows to workers and gathering the results is the job of `etude.distributed`.
"""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from etude.errors import DataError, one_line

T = TypeVar("T")
Slice = slice  # `DataProto.slice` shadows the builtin in its class's annotations
RowIds = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor
Keys = Iterable[str] | None


@dataclass
class DataProtoItem:
    """One row: tensors without the batch dimension, one object per column."""

    batch: Any = None  # TensorDict | None: tensordict has no types that a checker could use
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """Rows of tensors and objects, plus settings of the whole batch.

    Fields: `batch`, tensors (rows, …); `non_tensor_batch`, arrays (rows, …) of dtype object (lists assigned to it are
    converted); `meta_info`, deep-copied (dicts, lists, tuples, sets, arrays and tensors) whenever rows are selected.
    """

    batch: Any = None  # TensorDict | None: tensordict has no types that a checker could use
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.non_tensor_batch = {key: object_array(value) for key, value in given.items()}
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Sorts columns by type: tensors go to `batch`; numpy arrays and lists, one entry per row, to `non_tensor_batch`.

        `auto_padding` exists for compatibility with verl and has no effect: a batch that does not divide evenly among the
        ranks is always padded, and the padding rows are removed afterwards (`etude.distributed.dispatch`).

        Raises:
            ValueError: a column has another type, or the columns differ in length.
        """
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        objects = {key: value for key, value in data.items() if isinstance(value, np.ndarray | list)}
        for key in data.keys() - tensors.keys() - objects.keys():
            raise ValueError(f"column '{key}' is a {type(data[key]).__name__}, not a tensor, numpy array or list")
        return cls.from_dict(tensors, objects, meta_info)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> DataProto:
        """Builds a batch of `tensors` (rows, …) and `non_tensors` (one entry per row); without tensors `batch` is None.

        `auto_padding`: see `from_single_dict`.

        Raises:
            ValueError: columns differ in length, or a tensor has no dimension; names the column.
        """
        tensors, sizes = tensors or {}, {}
        for key, tensor in tensors.items():
            sizes[key] = tensor.shape[0] if isinstance(tensor, torch.Tensor) and tensor.ndim else None
            if sizes[key] is None or len(set(sizes.values())) > 1:
                raise ValueError(f"column '{key}' is not a tensor with the rows of the others (rows: {sizes})")
        batch = TensorDict(dict(tensors), batch_size=[*set(sizes.values())]) if tensors else None
        columns = {key: object_array(values) for key, values in (non_tensors or {}).items()}
        return cls(batch, columns, _deep_copy(dict(meta_info or {})))

    @classmethod
    def from_tensordict(cls, data: TensorDict) -> DataProto:
        """Converts a TensorDict: tensors go to `batch`, non-tensor stacks to object columns, other values to `meta_info`."""
        tensors: dict[str, torch.Tensor] = {}
        objects: dict[str, np.ndarray] = {}
        meta_info: dict[str, Any] = {}
        for key, value in data.items():
            if isinstance(value, NonTensorStack):
                objects[key] = object_array([cell.data for cell in value.tensordicts])
            elif isinstance(value, NonTensorData):
                meta_info[key] = value.data
            else:
                tensors[key] = value
        batch = TensorDict(tensors, batch_size=data.batch_size) if tensors or not objects else None
        return cls(batch, objects, _deep_copy(meta_info))

    # What a reference to a batch has too (`etude.distributed.BatchRef`), so that a batch can stand in for one.

    def fetch(self) -> DataProto:
        """Returns itself."""
        return self

    @property
    def columns(self) -> frozenset[str]:
        """Names of all columns."""
        return frozenset(self._tensors()) | self.non_tensor_batch.keys()

    @property
    def objects(self) -> frozenset[str]:
        """Names of the columns that are not tensors."""
        return frozenset(self.non_tensor_batch)

    def restrict(self, columns: Iterable[str]) -> DataProto:
        """Restricts the batch to those of `columns` that it has."""
        wanted = frozenset(columns)
        return self.select(sorted(wanted & self._tensors().keys()), sorted(wanted & self.non_tensor_batch.keys()))

    def to_tensordict(self) -> TensorDict:
        """Inverse of `from_tensordict`; raises ValueError if a key of `meta_info` is also a column."""
        data = TensorDict(self._tensors(), batch_size=[len(self)])
        for key, column in self.non_tensor_batch.items():
            data.set(key, NonTensorStack(*[NonTensorData(cell) for cell in column]))
        for key, value in _deep_copy(self.meta_info).items():
            if key in self._tensors() or key in self.non_tensor_batch:
                raise ValueError(f"'{key}' is both a column and a key of meta_info")
            data.set_non_tensor(key, value)
        return data

    def check_consistency(self) -> None:
        """Raises ValueError for several batch dimensions, or for a column of the wrong type or length or of both kinds."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise ValueError(f"batch must have one batch dimension, has {tuple(self.batch.batch_size)}")
        for key, tensor in self._tensors().items():
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"column '{key}' of batch is a {type(tensor).__name__}; see from_tensordict")
        for key, column in self._columns().items():
            if not isinstance(column, np.ndarray) or column.dtype != object or column.ndim == 0:
                raise ValueError(f"column '{key}' of non_tensor_batch is not an object array with one entry per row")
            if len(column) != len(self):
                raise ValueError(f"column '{key}' has {len(column)} rows, the batch has {len(self)}")
            if key in self._tensors():
                raise ValueError(f"column '{key}' is in batch and in non_tensor_batch")

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()), ()))

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...

    @overload
    def __getitem__(self, item: Slice | RowIds) -> DataProto: ...

    def __getitem__(self, item: int | Slice | RowIds) -> DataProtoItem | DataProto:
        """Returns one row for an int, a view for a slice, a copy for row numbers or a boolean mask.

        Raises IndexError for a row out of range, ValueError for a mask of the wrong length or non-integer row numbers.
        """
        if isinstance(item, slice):
            rows = range(len(self))[item]
            return self._rows(item) if rows.step > 0 else self.select_idxs(rows)
        if isinstance(item, int | np.integer):
            if not -len(self) <= item < len(self):
                raise IndexError(f"row {item} of a batch of {len(self)}")
            row = None if self.batch is None else self.batch[int(item)]
            cells = {key: column[item] for key, column in self.non_tensor_batch.items()}
            return DataProtoItem(row, cells, _deep_copy(self.meta_info))
        return self.select_idxs(item)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Returns the rows of `[start:end:step]`."""
        return self[Slice(start, end, step)]

    def select_idxs(self, idxs: RowIds) -> DataProto:
        """Returns the rows that a boolean mask (rows,) or row numbers select, in order; errors as in `__getitem__`."""
        return self._rows(self._row_numbers(idxs))

    def reorder(self, indices: RowIds) -> None:
        """Reorders the rows by `indices`, in place; raises ValueError if that is not a permutation of the rows."""
        rows = self._row_numbers(indices)
        if not torch.equal(rows.sort().values, torch.arange(len(self))):
            raise ValueError(f"indices must be a permutation of the {len(self)} rows")
        ordered = self._rows(rows)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int, interleave: bool = True) -> DataProto:
        """Repeats each row `repeat_times` times: a, b → a, a, b, b; without `interleave` a, b, a, b."""
        if repeat_times < 1:
            raise ValueError(f"repeat_times must be at least 1, is {repeat_times}")
        rows = torch.arange(len(self))
        return self._rows(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """Repeats row i `repeat_times[i]` times, copies side by side; 0 drops the row."""
        times = torch.as_tensor(repeat_times).long().cpu()
        if times.shape != (len(self),) or bool((times < 0).any()):
            raise ValueError(f"repeat_times must be {len(self)} counts of at least 0")
        return self._rows(torch.arange(len(self)).repeat_interleave(times))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Splits into `chunks` parts of equal size, in order; raises ValueError if the rows do not divide evenly."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(f"{len(self)} rows cannot be divided into {chunks} equal chunks; pad them first")
        size = len(self) // chunks
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Splits into parts of `split_size` rows, the last possibly shorter; an empty batch gives one empty part."""
        if split_size < 1:
            raise ValueError(f"split_size must be at least 1, is {split_size}")
        return [self[start : start + split_size] for start in range(0, max(len(self), 1), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Concatenates the rows of all parts, in order; always a copy.

        `meta_info["metrics"]` (a dict, or a list of dicts) of the parts is gathered into a dict of lists; any other key must
        have the same value in every part that has it.

        Raises:
            ValueError: no parts, parts with different columns or devices, or a conflict in meta_info; names it.
        """
        if not data:
            raise ValueError("nothing to concatenate")
        for part in data:
            unshared = (part._tensors().keys() ^ data[0]._tensors().keys()) | (
                part.non_tensor_batch.keys() ^ data[0].non_tensor_batch.keys()
            )
            if unshared:
                raise ValueError(f"column '{min(unshared)}' is not in every part")
        tensors = {k: _concat_tensors(k, [part._tensors()[k] for part in data]) for k in data[0]._tensors()}
        columns = {k: np.concatenate([part._columns()[k] for part in data]) for k in data[0].non_tensor_batch}
        bare = all(part.batch is None for part in data)
        batch = None if bare else TensorDict(tensors, batch_size=[sum(map(len, data))])
        return type(data[0])(batch, columns, _merge_meta([part.meta_info for part in data]))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, bool] | None = None,
    ) -> Iterator[DataProto]:
        """Iterates over mini-batches of equal size for `epochs` epochs.

        `dataloader_kwargs` accepts one key, `shuffle` (default False): a new permutation each epoch, drawn from `seed`,
        or from torch's global generator if `seed` is None.

        Raises:
            ValueError: the rows do not divide evenly into mini-batches, or an option is unknown.
        """
        options = {"shuffle": False, **(dataloader_kwargs or {})}
        if set(options) != {"shuffle"}:
            raise ValueError(f"dataloader_kwargs knows 'shuffle' only, got {', '.join(sorted(options))}")
        rows = len(self)
        if mini_batch_size < 1 or rows % mini_batch_size:
            raise ValueError(f"{rows} rows cannot be divided into mini-batches of {mini_batch_size}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        shuffle = options["shuffle"]
        orders = (torch.randperm(rows, generator=generator) if shuffle else torch.arange(rows) for _ in range(epochs))
        return (self._rows(part) for order in orders if rows for part in order.split(mini_batch_size))

    def to(self, device: torch.device | str | int) -> DataProto:
        """Moves the tensors of `batch` in place; returns itself."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Returns a batch with some of the columns and meta keys (None: all); `deepcopy` copies tensors and cells too.

        Raises ValueError for a key that does not exist.
        """
        tensors, objects, meta = self._validate_keys(
            batch_keys, non_tensor_batch_keys, meta_info_keys, default_all=True
        )
        batch = None if self.batch is None else self.batch.select(*tensors)
        columns = {key: self.non_tensor_batch[key] for key in objects}
        if deepcopy:
            batch, columns = None if batch is None else batch.clone(), _deep_copy(columns)
        return type(self)(batch, columns, _deep_copy({key: self.meta_info[key] for key in meta}))

    def pop(
        self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None
    ) -> DataProto:
        """Removes columns and meta keys (None: none) and returns them as a batch.

        Raises ValueError for a key that does not exist, before anything is removed.
        """
        tensors, objects, meta = self._validate_keys(
            batch_keys, non_tensor_batch_keys, meta_info_keys, default_all=False
        )
        popped = {key: self.batch.pop(key) for key in tensors} if self.batch is not None else {}
        columns = {key: self.non_tensor_batch.pop(key) for key in objects}
        return type(self).from_dict(popped, columns, {key: self.meta_info.pop(key) for key in meta})

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Renames columns of either kind in place (`a, b` → `b, a` swaps them); returns itself.

        Raises:
            ValueError: lists of unequal length, an unknown old name, or a new name that is taken or repeated.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"{len(old)} old names for {len(new)} new ones")
        names, columns = dict(zip(old, new)), [*self._tensors(), *self.non_tensor_batch]
        for key in names.keys() - set(columns):
            raise ValueError(f"no column '{key}' (there are: {', '.join(columns) or 'none'})")
        if len({names.get(key, key) for key in columns}) != len(columns):
            raise ValueError(f"renaming {old} to {new} would give two columns one name")
        if self.batch is not None:
            tensors = {names.get(key, key): tensor for key, tensor in self._tensors().items()}
            self.batch = TensorDict(tensors, batch_size=self.batch.batch_size)
        self.non_tensor_batch = {names.get(key, key): column for key, column in self.non_tensor_batch.items()}
        return self

    def union(self, other: DataProto) -> DataProto:
        """Adds the columns and meta keys of `other` in place; returns itself.

        Raises:
            ValueError: unequal numbers of rows, or a key whose values differ (NaN equals NaN); names the key. In that
                case nothing is added.
        """
        mine: dict[str, Any] = {**self._tensors(), **self._columns()}
        theirs: dict[str, Any] = {**other._tensors(), **other._columns()}
        if mine and theirs and len(self) != len(other):
            raise ValueError(f"cannot unite {len(self)} rows with {len(other)}")
        for place, ours, added in (("column", mine, theirs), ("meta_info", self.meta_info, other.meta_info)):
            for key in ours.keys() & added.keys():
                if not _same(ours[key], added[key]):
                    raise ValueError(f"{place} '{key}' differs between the two batches")
        if other._tensors():
            self.batch = TensorDict({**other._tensors(), **self._tensors()}, batch_size=[len(other)])
        self.non_tensor_batch = {**other.non_tensor_batch, **self.non_tensor_batch}
        self.meta_info = {**_deep_copy(other.meta_info), **self.meta_info}
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Packs each tensor as one contiguous byte array, which pickle protocol 5 sends out of band without a copy.

        A slice sends only its own bytes. Devices are not kept: tensors arrive on the CPU. Row objects and meta_info
        are pickled normally. Where the receiver's buffers are read-only (Ray's object store), tensors wrap them without a
        copy, and as everywhere workers must not write to them.
        """
        tensors = {key: pack_tensor(tensor) for key, tensor in self._tensors().items()}
        rows = None if self.batch is None else len(self)
        objects, meta_info = dict(self.non_tensor_batch), _deep_copy(self.meta_info)  # copy.copy uses this too
        return {"rows": rows, "tensors": tensors, "objects": objects, "meta_info": meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {key: unpack_tensor(*packed) for key, packed in state["tensors"].items()}
        self.batch = None if state["rows"] is None else TensorDict(tensors, batch_size=[state["rows"]])
        self.non_tensor_batch, self.meta_info = state["objects"], state["meta_info"]

    def save_to_disk(self, filepath: str | Path) -> None:
        """Writes the batch as a pickle, atomically."""
        path = Path(filepath)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                pickle.dump(self, file, protocol=5)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Loads a batch that `save_to_disk` wrote. A pickle can run arbitrary code: only load files you trust.

        Raises:
            DataError: the file does not exist or is not a saved batch; names it.
        """
        try:
            with open(filepath, "rb") as file:
                data = pickle.load(file)
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise DataError(f"cannot read '{filepath}' as a saved batch: {one_line(error)}") from error
        if not isinstance(data, DataProto):
            raise DataError(f"'{filepath}' holds a {type(data).__name__}, not a saved batch")
        return data

    def get_data_info(self) -> str:
        """Describes each column (shape, dtype and device, or the type of its first cell) and the keys of meta_info."""
        lines = [f"DataProto: {len(self)} rows"]
        for key, tensor in self._tensors().items():
            lines.append(f"  {key}: {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}")
        for key, column in self._columns().items():
            cell = type(column.flat[0]).__name__ if column.size else "nothing"
            lines.append(f"  {key}: {column.shape} objects, the first a {cell}")
        lines += [f"  meta_info '{key}': {type(value).__name__}" for key, value in self.meta_info.items()]
        return "\n".join(lines)

    def print_size(self, prefix: str = "") -> str:
        """Returns a line with the size of the tensors (of their rows, not their storage) and the number of cells."""
        size = sum(tensor.nbytes for tensor in self._tensors().values())
        cells = sum(column.size for column in self._columns().values())
        return f"{prefix}{len(self)} rows: {size / 2**20:.3f} MiB of tensors, {cells} objects"

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.batch is None else dict(self.batch.items())

    def _columns(self) -> dict[str, np.ndarray]:
        """The object columns, with lists that a user put in `non_tensor_batch` converted to arrays."""
        columns = self.non_tensor_batch.items()
        return {key: object_array(column) if isinstance(column, list) else column for key, column in columns}

    def _rows(self, rows: Slice | torch.Tensor) -> DataProto:
        batch = None if self.batch is None else self.batch[rows]
        if batch is not None and batch is self.batch:  # TensorDict's `[:]` returns itself, not a view
            batch = batch.copy()
        positions = rows if isinstance(rows, slice) else rows.numpy()
        columns = {key: column[positions] for key, column in self._columns().items()}
        return type(self)(batch, columns, _deep_copy(self.meta_info))

    def _row_numbers(self, idxs: RowIds) -> torch.Tensor:
        """Converts `idxs` to integers in [0, rows), on the CPU."""
        if isinstance(idxs, torch.Tensor | np.ndarray):
            rows = torch.as_tensor(idxs).cpu()
        else:
            rows = torch.tensor(list(idxs)) if len(idxs) else torch.empty(0, dtype=torch.long)
        if rows.dtype == torch.bool:
            if rows.shape != (len(self),):
                raise ValueError(f"a mask of shape {tuple(rows.shape)} for {len(self)} rows")
            return rows.nonzero().flatten()
        if rows.ndim != 1 or rows.is_floating_point() or rows.is_complex():
            raise ValueError(f"row numbers must be a flat list of integers, got {rows.dtype} {tuple(rows.shape)}")
        if len(rows) and not -len(self) <= int(rows.min()) <= int(rows.max()) < len(self):
            raise IndexError(f"a row number is out of range for a batch of {len(self)}")
        return rows.long() % max(len(self), 1)

    def _validate_keys(self, *wanted: Keys, default_all: bool) -> list[list[str]]:
        """Validates the requested keys of `batch`, `non_tensor_batch` and `meta_info`; None means all or none."""
        places: dict[str, Mapping[str, Any]] = {
            "batch": self._tensors(),
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }
        selected = []
        for (place, known), keys in zip(places.items(), wanted):
            chosen = list(known if default_all else ()) if keys is None else list(dict.fromkeys(keys))
            for key in chosen:
                if key not in known:
                    raise ValueError(f"no '{key}' in {place} (there are: {', '.join(known) or 'none'})")
            selected.append(chosen)
        return selected


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """Collates rows into a batch; raises ValueError for no rows, or rows that differ in columns, shapes or meta_info."""
    parts = []
    for item in items:
        tensors = {} if item.batch is None else {key: value.unsqueeze(0) for key, value in item.batch.items()}
        parts.append(DataProto.from_dict(tensors, {key: [value] for key, value in item.non_tensor_batch.items()}))
    data = DataProto.concat(parts)
    data.meta_info = _merge_meta([item.meta_info for item in items], gathered=())
    return data


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Appends copies of rows, cyclically from the first, until the size is a multiple of `size_divisor`.

    Rows 0, 1, 2 and divisor 4 give 0, 1, 2, 0; row 0 and divisor 3 give 0, 0, 0; an empty batch stays empty. Returns the
    padded batch and the number of rows appended.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor must be at least 1, is {size_divisor}")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data[:], 0
    return data.select_idxs(torch.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Removes the last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"cannot take {pad_size} rows of padding off {len(data)} rows")
    return data[: len(data) - pad_size]


class DataProtoFuture(Generic[T]):
    """A result still being computed: one future per part, and the function with which `get` gathers them, once."""

    def __init__(self, futures: Sequence[concurrent.futures.Future[Any]], collect: Callable[[list[Any]], T]) -> None:
        self._futures, self._collect = list(futures), collect
        self._result: list[T] = []

    @staticmethod
    def concat(futures: Sequence[concurrent.futures.Future[DataProto]]) -> DataProtoFuture[DataProto]:
        """A future of the concatenated parts."""
        return DataProtoFuture(futures, DataProto.concat)

    def chunk(self: DataProtoFuture[DataProto], chunks: int) -> list[DataProtoFuture[DataProto]]:
        """Futures of equal chunks of the result; if it does not divide evenly, their `get` raises."""

        def part(i: int) -> DataProtoFuture[DataProto]:
            return DataProtoFuture(self._futures, lambda _: self.get().chunk(chunks)[i])

        return [part(i) for i in range(chunks)]

    def get(self, timeout: float | None = None) -> T:
        """Waits for all parts, `timeout` seconds in total (None: no limit), and gathers them.

        Raises:
            TimeoutError: a part was not ready in time.
            Exception: the exception of the first part that failed.
        """
        if not self._result:
            _, missing = concurrent.futures.wait(self._futures, timeout)
            if missing:
                raise TimeoutError(f"{len(missing)} of {len(self._futures)} results were not ready in {timeout} s")
            self._result.append(self._collect([future.result() for future in self._futures]))
        return self._result[0]


def object_array(values: np.ndarray | Sequence[Any]) -> np.ndarray:
    """Converts to an object array (rows, …). A list becomes one cell per entry, however deeply entries nest; NumPy alone
    would turn entries of equal length into a second axis."""
    if isinstance(values, np.ndarray):
        return values.astype(object, copy=False)
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def _deep_copy(value: T) -> T:
    """Copies every dict, list, tuple, set, array and tensor in `value`; any other object is shared."""
    copied: Any = value
    if isinstance(value, dict):
        copied = value.copy()
        copied.update((key, _deep_copy(inner)) for key, inner in value.items())
    elif isinstance(value, list):
        copied = value.copy()
        copied[:] = map(_deep_copy, value)
    elif type(value) is tuple:
        copied = tuple(_deep_copy(inner) for inner in copied)
    elif isinstance(value, np.ndarray):
        copied = value.copy()
        for place in np.ndindex(value.shape) if value.dtype == object else ():
            copied[place] = _deep_copy(value[place])
    elif isinstance(value, set | torch.Tensor):
        copied = value.clone() if isinstance(value, torch.Tensor) else value.copy()
    return copied


def _same(a: Any, b: Any) -> bool:
    """Deep equality in which NaN equals NaN and arrays and tensors compare by shape, dtype and value."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        b = b.to(a.device)
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and _same(a.ravel().tolist(), b.ravel().tolist())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    arrays = torch.Tensor | np.ndarray
    return not isinstance(a, arrays) and not isinstance(b, arrays) and bool(a == b)


def _concat_tensors(key: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    if len({(tensor.shape[1:], tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        kinds = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device}" for tensor in tensors)
        raise ValueError(f"column '{key}' has parts that do not fit together: {kinds}")
    return torch.cat(tensors)


def _merge_meta(metas: Sequence[Mapping[str, Any]], gathered: Sequence[str] = ("metrics",)) -> dict[str, Any]:
    """Merges meta_infos: the `gathered` keys into dicts of lists; any other key must be equal wherever it occurs."""
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key in gathered:
                for metrics in value if isinstance(value, list) else [value]:
                    for name, number in metrics.items():
                        merged.setdefault(key, {}).setdefault(name, []).append(_deep_copy(number))
            elif not _same(merged.setdefault(key, _deep_copy(value)), value):
                raise ValueError(f"meta_info '{key}' differs between the parts")
    return merged


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor` as a flat uint8 tensor on the CPU; shares its memory if that is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # A single element counts as contiguous whatever its stride, but `view(dtype)` insists on stride 1.
    return flat.as_strided(flat.shape, (1,), flat.storage_offset()).view(torch.uint8)


def pack_tensor(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype, torch.Size]:
    """The arguments of `unpack_tensor`, which pickle sends without a copy."""
    return byte_view(tensor).numpy(), tensor.dtype, tensor.shape


def unpack_tensor(data: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Wraps the bytes as a tensor, without a copy; it must not be written to if the memory is shared."""
    if not data.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.asarray(_Memory(data))).view(dtype).reshape(shape)


class _Memory:
    """The memory of a byte array marked as writable, so that PyTorch wraps a read-only one without a warning."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data  # keeps the memory alive: NumPy holds a reference to this object
        address = data.__array_interface__["data"][0]
        self.__array_interface__ = {**data.__array_interface__, "data": (address, False)}
