"""`@register` and the seven dispatch modes: how a call is divided among ranks and its results collected. `DispatchMode` is
for custom ones.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from tensordict import TensorDict

from etude.distributed.plane import BatchRef
from etude.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor, unpad_dataproto

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""A call's positional and keyword arguments."""

F = TypeVar("F", bound=Callable[..., Any])

REGISTRATION = "_etude_registration"
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
    """A custom dispatch mode, passed to `register` instead of a `Dispatch`.

    `divide(shards, args, kwargs)` returns the arguments of each shard; `collect(results, args, kwargs)` combines the shards'
    results, in order, into one value. Both get the arguments of the original call.
    """

    divide: Callable[[int, tuple[Any, ...], dict[str, Any]], list[Arguments]]
    collect: Callable[[list[Any], tuple[Any, ...], dict[str, Any]], Any]

    def __call__(self, shards: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Divides a call.

        Raises:
            ValueError: `divide` did not return one entry per shard.
        """
        parts = self.divide(shards, args, kwargs)
        if len(parts) != shards:
            raise ValueError(f"a dispatch mode divided a call into {len(parts)} parts for {shards} shards")
        return Call(
            [part for part, _ in parts],
            [part for _, part in parts],
            lambda results: self.collect(results, args, kwargs),
        )


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

    def select(self, method: str, value: Any) -> Any:
        """Restricts an argument to the declared columns, if it is a batch or a list of batches.

        Raises:
            ValueError: a declared column is missing; names the column and the method.
        """
        if isinstance(value, list):
            return [self.select(method, each) for each in value]
        value = _wait_for(value)
        if self.columns is None or not isinstance(value, DataProto | BatchRef):
            return value
        tensors = set() if isinstance(value, BatchRef) or value.batch is None else set(value.batch.keys())
        known = value.columns if isinstance(value, BatchRef) else tensors | value.non_tensor_batch.keys()
        if missing := self.columns - known:
            raise ValueError(f"{method} needs the column '{min(missing)}', which the batch does not have")
        wanted = self.columns | self.optional
        if isinstance(value, BatchRef):
            return value.select(wanted)
        return value.select(sorted(tensors & wanted), sorted(value.non_tensor_batch.keys() & wanted))


@dataclass(frozen=True)
class Call:
    """A divided call: the arguments of shards 0, 1, … (ONE_TO_ALL: one entry for all ranks) and the collect function."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    collect: Callable[[list[Any]], Any]


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


def registered_methods(worker_cls: type) -> dict[str, Registration]:
    """The registered methods of a class by name. An override inherits the registration unless it has its own."""
    methods: dict[str, Registration] = {}
    for cls in reversed(worker_cls.__mro__):
        for name, attribute in vars(cls).items():
            if isinstance(registration := getattr(attribute, REGISTRATION, None), Registration):
                methods[name] = registration
    return methods


def divide(registration: Registration, shards: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Divides a call among `shards` shards, after waiting for any argument that is a `DataProtoFuture`.

    Raises:
        ValueError: the arguments do not fit the mode; says why.
        TypeError: a TensorDict where a `DataProto` is needed.
        RuntimeError: the method is a DIRECT_ROLLOUT_METHOD.
    """
    mode = registration.dispatch_mode
    args = tuple(_wait_for(value) for value in args)
    kwargs = {key: _wait_for(value) for key, value in kwargs.items()}
    if registration.execute_mode is Execute.RANK_ZERO:
        return Call([args], [kwargs], lambda results: results[0])
    if isinstance(mode, DispatchMode):
        return mode(shards, args, kwargs)
    if mode is Dispatch.ONE_TO_ALL:
        return Call([args], [kwargs], list)
    if mode in (Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE):
        return Call(*_split_arguments(shards, args, kwargs, lambda value: _per_rank_entries(value, shards)), list)
    if mode is Dispatch.DIRECT_ROLLOUT_METHOD:
        raise RuntimeError(f"a {mode.name} bypasses the controller: call it on one rank, with WorkerGroup.direct")
    if mode is Dispatch.DP_COMPUTE_PROTO_WITH_FUNC and not (args and callable(args[0])):
        raise ValueError(f"{mode.name} needs a function as its first positional argument")
    return _divide_rows(mode, shards, args, kwargs)


def _divide_rows(mode: Dispatch, world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    size = _common_size(mode, [*args, *kwargs.values()])
    chunk_size = -(-size // world_size)
    padding = [min(max((rank + 1) * chunk_size - size, 0), chunk_size) for rank in range(world_size)]
    idle = [0 < chunk_size == rows for rows in padding]
    metric = mode is Dispatch.DP_COMPUTE_METRIC
    removed = [rows if metric and not rank_idle else 0 for rows, rank_idle in zip(padding, idle)]

    def share(value: Any) -> list[Any]:
        if not isinstance(value, DataProto | BatchRef):
            return [value] * world_size
        rows: Any = value  # a reference is padded and divided like a batch
        chunks = pad_dataproto_to_divisor(rows, world_size)[0].chunk(world_size)
        chunks = [unpad_dataproto(chunk, rows) for chunk, rows in zip(chunks, removed)]
        for rank, chunk in enumerate(chunks):
            chunk.meta_info[PADDING_ROWS] = padding[rank] - removed[rank]
        return chunks

    def collect(results: list[Any]) -> Any:
        busy = [rank for rank in range(world_size) if not idle[rank]]
        if metric:
            return [results[rank] for rank in busy]
        return _gather_rows({rank: results[rank] for rank in busy}, chunk_size, padding)

    return Call(*_split_arguments(world_size, args, kwargs, share), collect)


def _common_size(mode: Dispatch, values: Sequence[Any]) -> int:
    """The number of rows that all batches among `values` share."""
    if any(isinstance(value, TensorDict) for value in values):
        raise TypeError(f"{mode.name} divides a DataProto: make one with DataProto.from_tensordict")
    batches = [value for value in values if isinstance(value, DataProto | BatchRef)]
    sizes = {len(batch) for batch in batches}
    if len(sizes) != 1:
        raise ValueError(f"{mode.name} needs batches (DataProto) of one size, got sizes {sorted(sizes) or 'of none'}")
    if any(batch.meta_info.get(PADDING_ROWS) for batch in batches):
        raise ValueError(f"the batch is a padded chunk already: remove its '{PADDING_ROWS}' before dividing it again")
    return sizes.pop()


def _gather_rows(results: dict[int, Any], chunk_size: int, padding: Sequence[int]) -> Any:
    """Concatenates the outputs of the ranks in `results` without their padding rows."""
    if all(result is None for result in results.values()):
        return None
    parts = []
    for rank, result in results.items():
        if not isinstance(result, DataProto | BatchRef):
            raise TypeError(f"rank {rank} returned a {type(result).__name__} where a DataProto is gathered")
        part: Any = result[:]
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


def _split_arguments(
    world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any], share: Callable[[Any], Sequence[Any]]
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Returns the arguments of each rank; `share` splits one argument into one value per rank."""
    positional = [share(value) for value in args]
    named = {key: share(value) for key, value in kwargs.items()}
    ranks = range(world_size)
    return (
        [tuple(shares[rank] for shares in positional) for rank in ranks],
        [{key: shares[rank] for key, shares in named.items()} for rank in ranks],
    )


def _per_rank_entries(value: Any, world_size: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or len(value) != world_size:
        got = f"{len(value)} entries" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
        raise ValueError(f"an argument must be a list with one entry for each of {world_size} ranks, got {got}")
    return value


def _wait_for(value: Any) -> Any:
    return value.get() if isinstance(value, DataProtoFuture) else value
