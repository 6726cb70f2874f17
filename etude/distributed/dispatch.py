"""`@register` and the dispatch modes: how a call is divided among ranks and its results collected. `MODES` is the table of
the seven documented ones; a `DispatchMode` is one of your own.

| mode | each rank gets | the caller gets |
|---|---|---|
| ONE_TO_ALL | the arguments | a list, one entry per rank |
| ALL_TO_ALL | its entry of each argument; an argument is a list with one entry per rank | a list, one entry per rank |
| DP_COMPUTE | the same, for data-parallel work | a list, one entry per rank |
| DP_COMPUTE_PROTO | its chunk of each `DataProto`, padded to equal size; other arguments whole | one `DataProto` |
| DP_COMPUTE_PROTO_WITH_FUNC | the same; the first argument is a function, passed to every rank | one `DataProto` |
| DP_COMPUTE_METRIC | its chunk of each `DataProto` without padding; other arguments whole | a list, see below |
| DIRECT_ROLLOUT_METHOD | not callable on the group; see `WorkerGroup.direct` | |
| a `DispatchMode` | what its `divide` returns | what its `collect` returns |

Meshes. Ranks of one tensor-parallel team need the same data. A method names a mesh, and `Worker.mesh_place` says which
shard of it a rank holds and whether that rank has the output. "Each rank" in DP modes means each shard of the method's mesh:
all its ranks get the shard's arguments, and the first rank with `collects` returns the shard's result.

Columns. A method may declare the columns of a batch that it reads; no others are sent to it. A `BatchRef` is divided like a
batch, and results that are references are concatenated like batches, in both cases without reading the data.

Invariant: how an argument is divided depends on the mode and its type, never on its length, and padding never reaches the
caller. Only modes whose arguments are per-rank lists split lists; elsewhere a list is an ordinary argument.

Padding. A batch that does not divide evenly is padded by `pad_dataproto_to_divisor`, so the copies are its last rows and
therefore the last rows of the last chunks. `meta_info["padding_rows"]` of each chunk is the number of its trailing rows that
are copies, so that a worker computing a loss or a metric can skip them. All ranks run, even one that holds only padding
(there may be a collective); the result of such a rank is dropped.
- PROTO: the padding rows of each output are removed. An output without rows (only metrics in meta_info) is taken
  as it is. An output whose number of rows differs from its chunk's must declare how many of its own trailing rows are
  padding, even if 0, in `meta_info["output_padding_rows"]`. If every rank returns None, so does the call.
- METRIC: chunks hold real rows only and differ in size; the list has one entry for each rank with a real row. A rank
  without one runs on copies and its result is dropped. An empty batch has no padding: every rank's result counts.

`worker_group.py` executes the calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from tensordict import TensorDict

from etude.distributed.plane import BatchRef
from etude.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor, unpad_dataproto

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""A call's positional and keyword arguments."""

F = TypeVar("F", bound=Callable[..., Any])

REGISTRATION, READS = "_etude_registration", "_etude_reads"
TRAIN_MESH = "train"
PADDING_ROWS = "padding_rows"
OUTPUT_PADDING_ROWS = "output_padding_rows"


class Dispatch(Enum):
    """How a call is divided among the ranks and its results collected; see the table in the module docstring."""

    ONE_TO_ALL = "one_to_all"
    ALL_TO_ALL = "all_to_all"
    DP_COMPUTE = "dp_compute"
    DP_COMPUTE_PROTO = "dp_compute_proto"
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    DP_COMPUTE_METRIC = "dp_compute_metric"
    DIRECT_ROLLOUT_METHOD = "direct_rollout_method"


class Execute(Enum):
    """Which ranks run: all, or only rank 0, with the arguments unchanged and its result returned as it is."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class DispatchMode:
    """A dispatch mode: `divide(shards, args, kwargs)` returns the arguments of each shard; `collect(results, args, kwargs)`
    combines the shards' results, in order, into one value. Both get the arguments of the original call."""

    divide: Callable[[int, tuple[Any, ...], dict[str, Any]], list[Arguments]]
    collect: Callable[[list[Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Registration:
    """The arguments of a method's `register`. Without `columns` all columns of a batch are sent."""

    dispatch_mode: Dispatch | DispatchMode
    execute_mode: Execute
    blocking: bool
    columns: frozenset[str] | None = None
    optional: frozenset[str] = frozenset()
    mesh: str = TRAIN_MESH
    in_background: bool = False

    @property
    def is_data_parallel(self) -> bool:
        """Whether a call is divided among the shards of a mesh rather than among ranks."""
        ranks = (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL, Dispatch.DIRECT_ROLLOUT_METHOD)
        return self.execute_mode is Execute.ALL and self.dispatch_mode not in ranks

    @property
    def mode(self) -> DispatchMode:
        """The functions that divide a call and collect its results."""
        if self.execute_mode is Execute.RANK_ZERO:
            return RANK_ZERO_MODE
        return MODES[self.dispatch_mode] if isinstance(self.dispatch_mode, Dispatch) else self.dispatch_mode

    def select(self, method: str, value: Any) -> Any:
        """Restricts an argument to the declared columns, if it is a batch or a list of batches; waits for a future.

        Raises:
            ValueError: a declared column is missing; names the column and the method.
        """
        if isinstance(value, list):
            return [self.select(method, each) for each in value]
        value = value.get() if isinstance(value, DataProtoFuture) else value
        if self.columns is None or not isinstance(value, DataProto | BatchRef):
            return value
        if missing := self.columns - value.columns:
            raise ValueError(f"{method} needs the column '{min(missing)}', which the batch does not have")
        return value.restrict(self.columns | self.optional)


def register(
    dispatch_mode: Dispatch | DispatchMode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    *,
    columns: Iterable[str] | None = None,
    optional: Iterable[str] = (),
    mesh: str = TRAIN_MESH,
    in_background: bool = False,
) -> Callable[[F], F]:
    """Decorates a method of a `Worker` so that its worker group exposes it; the method itself is unchanged.

    With `blocking=False` the group's method returns a `DataProtoFuture` immediately; its `get()` returns the result. The
    method reads the batch columns `columns` (None: all) and those of `optional` that exist. A DP mode divides among the
    shards of `mesh`. `in_background`: if ranks are processes, the method runs concurrently with the rank's other calls.

    Raises:
        TypeError: a mode is not of its enum, or a method is `async` but not DIRECT_ROLLOUT_METHOD.
        ValueError: RANK_ZERO with a mode that divides data among the ranks.
    """
    if not isinstance(dispatch_mode, Dispatch | DispatchMode) or not isinstance(execute_mode, Execute):
        raise TypeError(f"register takes a Dispatch and an Execute, got {dispatch_mode!r} and {execute_mode!r}")
    if execute_mode is Execute.RANK_ZERO and dispatch_mode not in (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL):
        name = getattr(dispatch_mode, "name", "a mode of one's own")
        raise ValueError(f"RANK_ZERO does not go with {name}, which every rank takes part in")

    needed = None if columns is None else frozenset(columns)
    registration = Registration(dispatch_mode, execute_mode, blocking, needed, frozenset(optional), mesh, in_background)

    def mark(method: F) -> F:
        if inspect.iscoroutinefunction(method) and dispatch_mode is not Dispatch.DIRECT_ROLLOUT_METHOD:
            raise TypeError(f"{method.__qualname__} is async: only a DIRECT_ROLLOUT_METHOD may be")
        setattr(method, REGISTRATION, registration)
        return method

    return mark


def reads(*columns: str) -> Callable[[F], F]:
    """Decorates a function for `RoleWorker.run`: of a batch that is passed by reference, it gets those of `columns` that the
    batch has. Without it, a function gets all."""

    def mark(function: F) -> F:
        setattr(function, READS, columns)
        return function

    return mark


def registered_methods(worker_cls: type) -> dict[str, Registration]:
    """The registered methods of a class by name. An override inherits the registration unless it has its own."""
    methods: dict[str, Registration] = {}
    for cls in reversed(worker_cls.__mro__):
        for name, attribute in vars(cls).items():
            if isinstance(registration := getattr(attribute, REGISTRATION, None), Registration):
                methods[name] = registration
    return methods


# -- the modes ---------------------------------------------------------------------------------------------------------


def _divide_whole(shards: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    return [(args, kwargs)] * shards


def _divide_lists(shards: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    for value in (*args, *kwargs.values()):
        if not isinstance(value, list | tuple) or len(value) != shards:
            got = f"{len(value)} entries" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
            raise ValueError(f"an argument must be a list with one entry for each of {shards} ranks, got {got}")
    return _deal(shards, args, kwargs, lambda value: value)


def _divide_rows(
    shards: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, metric: bool = False
) -> list[Arguments]:
    _, padding, idle = _padding(shards, args, kwargs)
    removed = [rows if metric and not is_idle else 0 for rows, is_idle in zip(padding, idle)]

    def share(value: Any) -> list[Any]:
        if not isinstance(value, DataProto | BatchRef):
            return [value] * shards
        rows: Any = value  # a reference is padded and divided like a batch
        chunks = pad_dataproto_to_divisor(rows, shards)[0].chunk(shards)
        chunks = [unpad_dataproto(chunk, rows) for chunk, rows in zip(chunks, removed)]
        for rank, chunk in enumerate(chunks):
            chunk.meta_info[PADDING_ROWS] = padding[rank] - removed[rank]
        return chunks

    return _deal(shards, args, kwargs, share)


def _divide_rows_for(shards: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    if not (args and callable(args[0])):
        raise ValueError("DP_COMPUTE_PROTO_WITH_FUNC needs a function as its first positional argument")
    return _divide_rows(shards, args, kwargs)


def _refuse(shards: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    raise RuntimeError("a DIRECT_ROLLOUT_METHOD bypasses the controller: call it on one rank, with WorkerGroup.direct")


def _collect_list(results: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return results


def _collect_first(results: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return results[0]


def _collect_metrics(results: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    _, _, idle = _padding(len(results), args, kwargs)
    return [result for result, is_idle in zip(results, idle) if not is_idle]


def _collect_rows(results: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenates the outputs of the ranks with a real row, without their padding rows."""
    chunk_size, padding, idle = _padding(len(results), args, kwargs)
    busy = [rank for rank in range(len(results)) if not idle[rank]]
    if all(results[rank] is None for rank in busy):
        return None
    parts = []
    for rank in busy:
        if not isinstance(results[rank], DataProto | BatchRef):
            raise TypeError(f"rank {rank} returned a {type(results[rank]).__name__} where a DataProto is gathered")
        part: Any = results[rank][:]
        part.meta_info.pop(PADDING_ROWS, None)
        declared = part.meta_info.pop(OUTPUT_PADDING_ROWS, None)
        if declared is None and len(part) not in (0, chunk_size):
            raise ValueError(
                f"rank {rank} returned {len(part)} rows for a chunk of {chunk_size}: "
                f"say how many of them are padding in meta_info['{OUTPUT_PADDING_ROWS}']"
            )
        if declared is None:
            declared = padding[rank] if len(part) else 0
        parts.append(unpad_dataproto(part, declared))
    return type(parts[0]).concat(parts)


RANK_ZERO_MODE = DispatchMode(_divide_whole, _collect_first)
MODES: Mapping[Dispatch, DispatchMode] = {
    Dispatch.ONE_TO_ALL: DispatchMode(_divide_whole, _collect_list),
    Dispatch.ALL_TO_ALL: DispatchMode(_divide_lists, _collect_list),
    Dispatch.DP_COMPUTE: DispatchMode(_divide_lists, _collect_list),
    Dispatch.DP_COMPUTE_PROTO: DispatchMode(_divide_rows, _collect_rows),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: DispatchMode(_divide_rows_for, _collect_rows),
    Dispatch.DP_COMPUTE_METRIC: DispatchMode(partial(_divide_rows, metric=True), _collect_metrics),
    Dispatch.DIRECT_ROLLOUT_METHOD: DispatchMode(_refuse, _collect_list),
}


def _padding(shards: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, list[int], list[bool]]:
    """The rows of a chunk, how many of each shard's are padding, and which shards have nothing else.

    Raises:
        ValueError: the batches among the arguments differ in size, or are padded chunks; there is none.
        TypeError: a TensorDict where a `DataProto` is needed.
    """
    values = (*args, *kwargs.values())
    if any(isinstance(value, TensorDict) for value in values):
        raise TypeError("a call divided by rows takes a DataProto: make one with DataProto.from_tensordict")
    batches = [value for value in values if isinstance(value, DataProto | BatchRef)]
    sizes = {len(batch) for batch in batches}
    if len(sizes) != 1:
        raise ValueError(f"a call divided by rows needs batches of one size, got sizes {sorted(sizes) or 'of none'}")
    if any(batch.meta_info.get(PADDING_ROWS) for batch in batches):
        raise ValueError(f"the batch is a padded chunk already: remove its '{PADDING_ROWS}' before dividing it again")
    size = sizes.pop()
    chunk_size = -(-size // shards)
    padding = [min(max((rank + 1) * chunk_size - size, 0), chunk_size) for rank in range(shards)]
    return chunk_size, padding, [0 < chunk_size == rows for rows in padding]


def _deal(
    shards: int, args: tuple[Any, ...], kwargs: dict[str, Any], share: Callable[[Any], Sequence[Any]]
) -> list[Arguments]:
    """Returns the arguments of each shard; `share` splits one argument into one value per shard."""
    positional = [share(value) for value in args]
    named = {key: share(value) for key, value in kwargs.items()}
    return [
        (tuple(shares[rank] for shares in positional), {key: shares[rank] for key, shares in named.items()})
        for rank in range(shards)
    ]
