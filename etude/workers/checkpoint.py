"""What a trained role saves: a model folder for any Hugging Face program, and beside it the state that training resumes
from, written by `torch.distributed.checkpoint`.

Invariant: the state holds only tensors, by parameter name, and is the same whatever number of ranks wrote it; reading a
foreign one runs no code; any fault of a file is one `CheckpointError` that names it.
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

MODEL, STATE = "huggingface", "state"  # the two parts of a role
_OLD_STATE = "optimizer.pt"  # of an earlier format

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class TrainedWorker(RoleWorker):
    """A role with a `model` and its optimizer, which a checkpoint holds in the folder `role`."""

    role: str
    model: Any
    _optimizer: OptimizerSet
    _copied: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
    _group: dist.ProcessGroup | None = None

    def mesh_place(self, mesh: str) -> MeshPlace:
        """In training, `tensor_parallel_size` ranks in a row get the same rows, and the first of them answers."""
        options = getattr(self.options, self.role)
        if mesh != TRAIN_MESH or not self.is_spread(options):
            return super().mesh_place(mesh)
        team = options.fsdp_config.tensor_parallel_size
        return MeshPlace(self.rank // team, self.world_size // team, self.rank % team == 0)

    def build_optimizer(
        self, options: ActorOptions | CriticOptions, total_steps: int | None, first_step: int = 0
    ) -> OptimizerSet:
        """The optimizer of `model`, which computes in `model.dtype` from here on, and is sharded if `options` say so."""
        dtype, sharded = torch_dtype(self.options.model.dtype), self.shard(self.model, options)
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
        """Called by all ranks at the end of `init_model`: saves in the background must not meet the training's collective
        operations."""
        if self.world_size > 1 and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    def weights_changed(self) -> None:
        """Called after each change of the weights."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, in_background=True)
    def copy_state(self) -> None:
        """Copies weights and optimizer state to the CPU's memory, for the next `save_checkpoint`: it may run in another
        thread, and writes the weights of this moment whatever is trained meanwhile."""
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
        self._copied = (weights, {n: copy(t) for n, t in self._optimizer.state_dict().items()})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, in_background=True)
    def save_checkpoint(self, folder: str) -> None:
        """Writes `ROLE/huggingface` (a folder any Hugging Face program loads), `ROLE/state` and, where there are adapters,
        `ROLE/lora_adapter`, of the moment of `copy_state` if that was called, else of now.

        Raises:
            CheckpointError: a file cannot be written.
        """
        target = Path(folder) / self.role
        weights, state = self._copied or (self._full_weights(), self._optimizer.state_dict())
        self._copied = None
        if self.rank == 0:
            self._write_model(target / MODEL, weights)
            if has_adapters(self.model):
                save_adapters(self.model, target / ADAPTER_FOLDER, weights)
        if self._group is not None or self.rank == 0:
            write_state(state, target / STATE, self._group)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model(self, folder: str) -> None:
        """Writes the model alone, as it is now, into `folder`."""
        weights = self._full_weights()
        if self.rank == 0:
            self._write_model(Path(folder), weights)

    def _full_weights(self) -> dict[str, Tensor] | None:
        """The gathered weights of a sharded model, on rank 0's CPU; None: the model has them itself."""
        if not is_sharded(self.model):
            return None
        return gather_weights(self.model, torch_dtype(self.options.model.dtype), keep=self.rank == 0)

    def _write_model(self, folder: Path, weights: dict[str, Tensor] | None) -> None:
        save_pretrained(self.model, self.bundle.processor or self.tokenizer, folder, weights)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Restores weights, in place, and the optimizer's state, bit for bit.

        Raises:
            CheckpointError: the state cannot be read, or is that of another model or optimizer; nothing has changed then.
        """
        self._optimizer.load_state_dict(read_state(Path(folder) / self.role / STATE, empty=self._optimizer.empty))
        self.weights_changed()


def write_state(state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes a folder for `read_state`; all ranks of `group` write parts of it.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        writer = dcp.FileSystemWriter(folder)
        dcp.save(dict(state), storage_writer=writer, process_group=group, no_dist=group is None)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {_cause(error)}") from error


def read_state(
    folder: Path, prefix: str = "", empty: Callable[[str, torch.Size, torch.dtype], Tensor] | None = None
) -> dict[str, Tensor]:
    """The state that `write_state` wrote to `folder`, on the CPU, whatever the number of ranks then and now; only the
    tensors whose names begin with `prefix`. `empty` makes what a tensor is read into, where that is a part of it.

    Raises:
        CheckpointError: a file is missing or damaged, or holds something else.
    """
    try:
        reader = _Reader(folder)
        parts = {n: part for n, part in reader.read_metadata().state_dict_metadata.items() if n.startswith(prefix)}
        make = empty or (lambda name, size, dtype: torch.empty(size, dtype=dtype))
        state = {name: make(name, part.size, part.properties.dtype) for name, part in parts.items()}  # type: ignore[union-attr]
        dcp.load(state, storage_reader=reader, no_dist=True)
    except (CheckpointException, Exception) as error:  # a damaged file raises anything
        if (folder.parent / _OLD_STATE).is_file():
            raise CheckpointError(
                f"{folder.parent} was written by an older version, which kept the state in {_OLD_STATE}: start a new run "
                f"from the model in {folder.parent / MODEL}"
            ) from error
        raise CheckpointError(f"{folder}: cannot be read: {_cause(error)}") from error
    return state


def _cause(error: BaseException) -> str:
    """`CheckpointException` lists failures by rank; the first says what happened."""
    failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    first = failures[0][0] if failures else error
    return one_line(first) or type(first).__name__


class _Reader(dcp.FileSystemReader):
    """Reads the index, which is a pickle, with nothing but its own classes."""

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
        found = f"{module}.{name}"
        if found in self._INDEX | self._PLAIN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"names {found}, which no index of tensors holds")
