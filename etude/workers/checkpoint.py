"""Checkpoints of trained roles: a model folder that any Hugging Face program loads, and the state to resume training from,
written by `torch.distributed.checkpoint`.

Invariant: the state holds only tensors, by parameter name, and does not depend on the number of ranks that wrote it; reading
an untrusted one runs no code; any fault of a file is a `CheckpointError` that names it.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from etude.distributed import Dispatch, MeshPlace, register
from etude.distributed.dispatch import TRAIN_MESH
from etude.errors import CheckpointError, one_line
from etude.models import save_pretrained, torch_dtype
from etude.models.lora import ADAPTER_FOLDER, has_adapters, save_adapters
from etude.models.named_weights import gather_weights
from etude.options import ActorOptions, CriticOptions
from etude.training import OptimizerSet, is_sharded, round_weights
from etude.workers.role import RoleWorker

MODEL, STATE = "huggingface", "state"  # the two parts of a role's checkpoint
_OLD_STATE = "optimizer.pt"  # of an earlier format

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class TrainedWorker(RoleWorker):
    """A role with a `model` and its optimizer, checkpointed in the folder `role`."""

    role: str
    model: Any
    _optimizer: OptimizerSet
    _copied: tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]] | None = None
    _group: dist.ProcessGroup | None = None

    def mesh_place(self, mesh: str) -> MeshPlace:
        """In training, the consecutive ranks of a team get the same rows, and the first of them has the output."""
        if mesh != TRAIN_MESH:
            return super().mesh_place(mesh)
        options = getattr(self.options, self.role)
        team = options.fsdp_config.tensor_parallel_size if self.is_spread(options) else 1
        team *= self.sequence_ranks(options)
        return MeshPlace(self.rank // team, self.world_size // team, self.rank % team == 0)

    def build_optimizer(
        self, options: ActorOptions | CriticOptions, total_steps: int | None, first_step: int = 0
    ) -> OptimizerSet:
        """Builds the optimizer of `model`; from then on the model computes in `model.dtype`, and is sharded if `options` say
        so."""
        dtype, sharded = torch_dtype(self.dtype), self.shard(self.model, options)
        return OptimizerSet(
            self.model,
            options.optim,
            total_steps,
            first_step=first_step,
            exact=None if sharded else round_weights(getattr(self.model, "backbone", self.model), dtype),
            rank=self.rank,
            world_size=self.world_size,
            dtype=dtype if sharded else None,
        )

    def prepare_saves(self) -> None:
        """Called by all ranks at the end of `init_model`: gives background saves their own process group, separate from the
        collectives of training."""
        if self.world_size > 1 and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    def weights_changed(self) -> None:
        """Hook called after each change of the weights."""

    def states(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint keeps beside the model, by place in its folder."""
        return {f"{self.role}/{STATE}": self._optimizer.state_dict()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, in_background=True)
    def copy_state(self) -> None:
        """Copies weights and states to CPU memory for the next `save_checkpoint`, which may run in another thread
        and writes this snapshot although training continues."""
        copies: dict[tuple[Any, ...], Tensor] = {}

        def copy(tensor: Tensor) -> Tensor:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            key = (own.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if key not in copies or not own.numel():  # tied weights stay tied
                copies[key] = tensor.detach().to("cpu", copy=True)
            return copies[key]

        weights = self._full_weights()
        if weights is None:
            weights = {n: copy(t) for n, t in self.model.state_dict().items()} if self.rank == 0 else {}
        self._copied = (
            weights,
            {place: {n: copy(t) for n, t in state.items()} for place, state in self.states().items()},
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, in_background=True)
    def save_checkpoint(self, folder: str) -> None:
        """Writes `ROLE/huggingface` (a folder that any Hugging Face program loads), the `states` and, if there are adapters,
        `ROLE/lora_adapter`: the snapshot of `copy_state` if there is one, else the current weights.

        Raises:
            CheckpointError: a file cannot be written.
        """
        target = Path(folder) / self.role
        weights, states = self._copied or (self._full_weights(), self.states())
        self._copied = None
        if self.rank == 0:
            self._write_model(target / MODEL, weights)
            if has_adapters(self.model):
                save_adapters(self.model, target / ADAPTER_FOLDER, weights)
        if self._group is not None or self.rank == 0:
            for place, state in states.items():
                write_state(state, Path(folder) / place, self._group)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model(self, folder: str) -> None:
        """Writes only the model, with its current weights, into `folder`."""
        weights = self._full_weights()
        if self.rank == 0:
            self._write_model(Path(folder), weights)

    def _full_weights(self) -> dict[str, Tensor] | None:
        """The gathered weights of a sharded model, on rank 0's CPU; None if the model is not sharded."""
        if not is_sharded(self.model):
            return None
        return gather_weights(self.model, torch_dtype(self.dtype), keep=self.rank == 0)

    def _write_model(self, folder: Path, weights: dict[str, Tensor] | None) -> None:
        save_pretrained(self.model, self.bundle.processor or self.tokenizer, folder, weights)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Restores weights, in place, and the optimizer's state, bit for bit.

        Raises:
            CheckpointError: the state cannot be read, or belongs to another model or optimizer; then nothing is changed.
        """
        self._optimizer.load_state_dict(read_state(Path(folder) / self.role / STATE, empty=self._optimizer.empty))
        self.weights_changed()


def write_state(state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes `state` to a folder that `read_state` reads; all ranks of `group` write parts of it.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    try:
        writer = dcp.FileSystemWriter(folder)
        dcp.save(dict(state), storage_writer=writer, process_group=group, no_dist=group is None)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {_cause(error)}") from error


def read_state(
    folder: Path, prefix: str = "", empty: Callable[[str, torch.Size, torch.dtype], Tensor] | None = None
) -> dict[str, Tensor]:
    """Reads the state that `write_state` wrote to `folder`, on the CPU; the number of ranks may differ. Only tensors whose
    names begin with `prefix` are read. `empty` allocates the tensor to read into, for example a shard of it.

    Raises:
        CheckpointError: a file is missing, damaged or of another kind.
    """
    try:
        reader = _Reader(folder)
        parts = {n: part for n, part in reader.read_metadata().state_dict_metadata.items() if n.startswith(prefix)}
        make = empty or (lambda name, size, dtype: torch.empty(size, dtype=dtype))
        state = {name: make(name, part.size, part.properties.dtype) for name, part in parts.items()}  # type: ignore[union-attr]
        dcp.load(state, storage_reader=reader, no_dist=True)
    except (CheckpointException, Exception) as error:  # a damaged file can raise anything
        if (folder.parent / _OLD_STATE).is_file():
            raise CheckpointError(
                f"{folder.parent} was written by an older version, which kept the state in {_OLD_STATE}: start a new run "
                f"from the model in {folder.parent / MODEL}"
            ) from error
        raise CheckpointError(f"{folder}: cannot be read: {_cause(error)}") from error
    return state


def _cause(error: BaseException) -> str:
    """The reason of an error; of a `CheckpointException`, which lists failures by rank, the first failure's."""
    failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    first = failures[0][0] if failures else error
    return one_line(first) or type(first).__name__


class _Reader(dcp.FileSystemReader):
    """Unpickles the index with an allowlist of its own classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"holds a {type(metadata).__name__}, not an index")
        return metadata


class _Unpickler(pickle.Unpickler):
    _INDEX = frozenset(
        f"torch.distributed.checkpoint.{name}"
        for name in (
            "metadata.Metadata",
            "metadata.MetadataIndex",
            "metadata.TensorStorageMetadata",
            "metadata.ChunkStorageMetadata",
            "metadata.TensorProperties",
            "metadata.StorageMeta",
            "metadata._MEM_FORMAT_ENCODING",
            "filesystem._StorageInfo",
        )
    )
    _PLAIN = frozenset(
        {"torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath"}
    )

    def find_class(self, module: str, name: str) -> Any:
        qualified = f"{module}.{name}"
        if qualified in self._INDEX | self._PLAIN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"names {qualified}, which no index of tensors holds")
