"""Weight sync to a separate rollout group: the training group sends chunks of named tensors through the data plane, and
every rollout worker reads each chunk once.

Invariant: at most two chunks are in flight, so neither a process nor the object store holds a second copy of the model.
Every tensor comes with its checksum in the trainer: a native engine verifies it in the memory that it samples from; for
other engines it is verified before the file that they load is written.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from etude.distributed import WorkerGroup
from etude.inference import ENGINES, ProbeDraws, StaleCheck
from etude.metrics import Max, Metrics
from etude.models import torch_dtype
from etude.models.lora import adapter_config, peft_name
from etude.models.named_weights import Chunk, check_sent, checksum, full_state, own_weights
from etude.options import ModelOptions, TrainOptions
from etude.protocol import DataProto, object_array, pack_tensor, unpack_tensor
from etude.training import is_sharded

INDEX = "model.safetensors.index.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # tells machines of one hostname apart
_WEIGHTS, _CONFIG = "weights", "config"
BYTES = "bytes"  # of the model that a chunk for a served engine belongs to


def keeps_adapters(model: ModelOptions) -> bool:
    """Whether a native engine with its own model also has the actor's LoRA adapters, so that only these are sent."""
    return bool(model.lora_rank) and model.quantization is None


class WeightSender:
    """Produces the chunks of an actor's weights; the ranks of a sharded model produce them together."""

    def __init__(self, model: Any, options: TrainOptions, dtype: str, rank: int) -> None:
        self._model, self._options, self._dtype, self._rank = model, options, torch_dtype(dtype), rank
        self._frozen_sent = False
        self._chunks: Iterator[tuple[Chunk, dict[str, Any]]] = iter(())

    def next(self, first: bool) -> DataProto:
        """Returns the next chunk (see `pack_chunk`); `first` starts a new sync. An empty batch after the last chunk, and on
        all ranks other than 0."""
        if self._rank and not is_sharded(self._model):
            return DataProto()
        if first:
            self._chunks = self._produce_chunks()
        chunk = next(self._chunks, None)
        if chunk is None or self._rank:
            return DataProto()
        return pack_chunk(*chunk)

    def _produce_chunks(self) -> Iterator[tuple[Chunk, dict[str, Any]]]:
        model, rollout, options = self._model, self._options.rollout, self._options.model
        dtype = self._dtype
        if not hasattr(ENGINES.get(rollout.name), "from_setup"):
            dtype = torch_dtype(rollout.dtype) if rollout.dtype else dtype
            kept = "alone" if self._frozen_sent else "kept"
            for chunk in full_state(model, dtype=dtype, adapters=kept if keeps_adapters(options) else "merged"):  # type: ignore[arg-type]
                yield chunk, {}
            self._frozen_sent = True
        else:
            adapters = rollout.weight_transfer == "adapter"
            about = {_CONFIG: folder_config(model, adapters), BYTES: weight_bytes(model)}
            for chunk in checkpoint_chunks(model, dtype, adapters):
                yield chunk, about


def checkpoint_chunks(model: Any, dtype: torch.dtype, adapters: bool) -> Iterator[Chunk]:
    """Yields the weights in `dtype` under the names of a checkpoint, which engines know; with `adapters`, LoRA's alone, as
    one chunk under peft's names. Collective over the ranks of a sharded model."""
    if adapters:
        yield [(peft_name(name), tensor) for chunk in full_state(model, adapters="alone") for name, tensor in chunk]
        return
    from transformers.core_model_loading import revert_weight_conversion

    for chunk in full_state(model, dtype=dtype):
        yield list(revert_weight_conversion(model, dict(chunk)).items())


def folder_config(model: Any, adapters: bool) -> str:
    """The config.json of a folder with these weights, or adapter_config.json."""
    return adapter_config(model) if adapters else str(model.config.to_json_string())


def weight_bytes(model: Any) -> int:
    """Size of the whole model's weights."""
    return sum(tensor.nbytes for tensor in own_weights(model).values())


class CheckpointFolder:
    """A folder for an engine to load, written chunk by chunk: a whole model, or `adapters`, which are a single chunk."""

    def __init__(self, folder: Path, adapters: bool, writes: bool = True) -> None:
        """`writes`: false on a rank whose node's first rank writes the folder."""
        self.folder, self._adapters, self._writes = folder, adapters, writes
        if writes:
            shutil.rmtree(folder, ignore_errors=True)  # left by a sync that failed
            folder.mkdir(parents=True)
        self._files: dict[str, str] = {}

    def receive(self, data: DataProto) -> str:
        """Adds a chunk that another group sent; returns the config to `finish` with.

        Raises:
            EtudeError: a tensor differs from what was sent; names it.
        """
        chunk, sums = tensors_of(data)
        if self._writes:
            for name, tensor in chunk:
                check_sent(name, tensor, sums)
        self.write(chunk)
        return str(data.meta_info[_CONFIG])

    def write(self, chunk: Chunk) -> None:
        """Adds a chunk."""
        if not self._writes:
            return
        number = len(set(self._files.values()))
        file = "adapter_model.safetensors" if self._adapters else f"model-{number:05}.safetensors"
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in chunk}
        save_file(tensors, self.folder / file, {"format": "pt"})
        self._files |= {name: file for name, _ in chunk}

    def finish(self, config: str) -> None:
        """Writes the model or adapter config and, for a model, the index of the files; waits for the ranks that write."""
        try:
            if self._writes:
                (self.folder / ("adapter_config.json" if self._adapters else "config.json")).write_text(config)
                if not self._adapters:
                    (self.folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": self._files}))
        finally:
            gather_objects(None)


def gather_objects(value: Any) -> list[Any]:
    """The `value` of every rank of this process's world (collective); that of this one alone if it is in none."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def share_on_node(make: Callable[[], Path]) -> tuple[Path, bool]:
    """Returns the folder that the first rank on this node makes, and whether this is that rank (collective)."""
    nodes = gather_objects((platform.node(), _BOOT.read_text() if _BOOT.exists() else ""))
    rank = dist.get_rank() if dist.is_initialized() else 0
    first = nodes.index(nodes[rank])
    made = gather_objects(make() if first == rank else None)
    return made[first], first == rank


def pack_chunk(chunk: Chunk, about: dict[str, Any]) -> DataProto:
    """One row with the chunk's tensors and their checksums, by name; a store copies them once."""
    row = {name: (checksum(tensor), *pack_tensor(tensor)) for name, tensor in chunk}
    return DataProto.from_single_dict({_WEIGHTS: object_array([row])}, meta_info=about)


def tensors_of(data: DataProto) -> tuple[Chunk, dict[str, int]]:
    """A chunk's tensors, in the store's memory (read only), and their checksums by name."""
    row = data.non_tensor_batch[_WEIGHTS][0]
    return [(name, unpack_tensor(*packed)) for name, (_, *packed) in row.items()], {n: row[n][0] for n in row}


def sync_weights(actor: WorkerGroup, rollout: WorkerGroup, version: int, check: StaleCheck) -> list[Metrics]:
    """Syncs the weights of `actor` to `rollout`, a separate group, as `version`, and probes its engines: the actor scores
    what they sample, and `check`, the same for every sync of the groups, compares.

    Raises:
        EtudeError: a tensor differs from what was sent.
        WeightSyncError, WeightMismatch: see `EngineLink.push`.
    """
    chunk, *_ = actor.next_weights(True)
    while len(chunk):
        loading = rollout.load_weights(chunk)
        following, *_ = actor.next_weights(False)  # while the previous chunk is being loaded
        loading.get()
        chunk = following
    metrics: list[Metrics] = rollout.update_weights(version)
    drawn: list[tuple[int, ProbeDraws]] = [(rank, d) for rank, each in enumerate(rollout.probe_draws()) for d in each]
    if drawn:
        expected = iter(actor.score_draws([row for _, each in drawn for row in each.rows])[0])
        judged = [check.judge(d, [next(expected) for _ in d.log_probs], f"{rank}/{d.name}") for rank, d in drawn]
        metrics.append({"weight_sync/largest_difference": Max(max(result.largest for result in judged))})
    return metrics
