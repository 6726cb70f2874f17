"""Weight sync: sends weights by name from a trained model, sharded or not, to a separate copy that an engine samples from.

Invariant: tied weights are sent once. The copy equals what was sent, tensor by tensor, in the copy's precision, or an error
names the tensor. Adapters are merged into the weights, unless the copy has the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from etude.errors import EtudeError
from etude.models.lora import is_factor, merged_weights

Chunk = list[tuple[str, Tensor]]
_BUCKET = 256 << 20  # bytes per chunk
_WORD = 8  # bytes
_BLOCK = 1 << 16  # words per block of a checksum, whose products fit a CPU's cache
_GPU_BLOCKS = 64  # at a time: each time the host waits
_MIX = 0x9E3779B97F4A7C1  # odd, so that no two positions have the same weight


def full_tensor(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor (collective over the ranks of its mesh); returns any other tensor unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return whole


def shard_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """Shards `whole`, which all ranks have, like `tensor`."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to(tensor.device)


@torch.no_grad()
def full_state(
    model: Any,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = _BUCKET,
    adapters: Literal["merged", "kept", "alone"] = "merged",
) -> Iterator[Chunk]:
    """Yields chunks of (name, full tensor) of at most `bucket_bytes`, or with a single larger tensor.

    All ranks with shards of the model must iterate to the end, because gathering is collective; all of them get the tensors.
    Those of an unsharded model may be the model's own: copy them before training goes on.

    Args:
        dtype: floating-point tensors are rounded to this dtype, if possible before they are gathered; None: unchanged.
        adapters: "merged": merged into the weights, under the names of the model without adapters; "kept": separate, for a
            copy with the same adapters; "alone": only the adapters, without the frozen weights.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    own = own_weights(model)
    named: Iterable[tuple[str, Tensor]]
    if adapters == "merged":
        named = merged_weights(model, own, lambda t, exact: full_tensor(t if exact else cast(t)))
    else:
        named = ((name, full_tensor(cast(t))) for name, t in own.items() if adapters == "kept" or is_factor(name))
    chunk: Chunk = []
    room = bucket_bytes
    for name, tensor in named:
        whole = cast(tensor).detach()
        if chunk and whole.nbytes > room:
            yield chunk
            chunk, room = [], bucket_bytes
        chunk.append((name, whole))
        room -= whole.nbytes
    if chunk:
        yield chunk


def own_weights(model: Any) -> dict[str, Tensor]:
    """Returns the tensors of the model's state dict, tied ones only under their first name."""
    kept: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        kept.setdefault(id(tensor), (name, tensor))
    return dict(kept.values())


@torch.no_grad()
def gather_weights(model: Any, dtype: torch.dtype, keep: bool = True) -> dict[str, Tensor]:
    """Gathers `own_weights` of a sharded model as whole tensors on the CPU, rounded to `dtype` except a value head
    (collective); without `keep`, takes part but returns nothing."""
    gathered: dict[str, Tensor] = {}
    prefix = "backbone." if hasattr(model, "backbone") else ""
    for name, tensor in own_weights(model).items():
        whole = full_tensor(tensor.to(dtype) if name.startswith(prefix) else tensor)
        if keep:
            gathered[name] = whole.detach().to("cpu", copy=True)  # on a mesh of one rank, `whole` is the weight itself
    return gathered


class WeightCopy:
    """Copies chunks of `full_state` into the weights of `model`, in place and rounded to its precision."""

    def __init__(self, model: Any) -> None:
        self._own: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
        self._sums: dict[str, int] = {}

    @torch.no_grad()
    def copy(self, chunk: Chunk, sums: Mapping[str, int] | None = None) -> None:
        """Copies one chunk; `sums`: the checksums of its tensors at the sender.

        Raises:
            EtudeError: a tensor is unknown to the model, has another shape, or differs from what was sent; names it.
        """
        for name, tensor in chunk:
            if name not in self._own:
                raise EtudeError(f"weight sync: the engine's model has no tensor '{name}'")
            own = self._own[name]
            if own.shape != tensor.shape:
                raise EtudeError(
                    f"weight sync: '{name}' has shape {tuple(tensor.shape)}, in the engine's model {tuple(own.shape)}"
                )
            rounded = tensor.to(own.dtype)
            own.copy_(rounded)
            if sums is not None and rounded.dtype == tensor.dtype:
                self._sums[name] = sums[name]
                continue
            if sums is not None:
                check_sent(name, tensor, sums)
            self._sums[name] = checksum(rounded)

    def check(self) -> None:
        """Checks the result after all chunks; if only adapters were sent, the other weights may be missing.

        Raises:
            EtudeError: a tensor was not sent, or differs from what was sent; names it.
        """
        adapters_alone = bool(self._sums) and all(map(is_factor, self._sums))
        reached = {id(self._own[name]) for name in self._sums}
        for name, tensor in self._own.items():
            if id(tensor) not in reached and (is_factor(name) or not adapters_alone):
                raise EtudeError(f"weight sync: '{name}' of the engine's model was not sent")
        for name in self._sums:
            check_sent(name, self._own[name], self._sums, "is not in the engine's model what was sent")


def check_sent(name: str, tensor: Tensor, sums: Mapping[str, int], what: str = "is not what was sent") -> None:
    """Raises EtudeError unless the tensor's checksum is that in `sums`."""
    if checksum(tensor) != sums[name]:
        raise EtudeError(f"weight sync: '{name}' {what}")


def weight_checksums(model: Any) -> dict[str, int]:
    """Returns the checksum of each of `own_weights`."""
    return {name: checksum(tensor) for name, tensor in own_weights(model).items()}


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Computes a checksum of a tensor's bits and their positions; the same on any device."""
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(bits) % _WORD or bits.storage_offset() % _WORD:
        bits = F.pad(bits, (0, -len(bits) % _WORD))
    words = bits.view(torch.int64)
    places = torch.arange(1, min(len(words), _BLOCK) + 1, device=bits.device) * _MIX
    total = 0
    for part in words.split(_BLOCK if bits.device.type == "cpu" else _BLOCK * _GPU_BLOCKS):
        whole = len(part) // _BLOCK * _BLOCK
        sums = (part[:whole].view(-1, _BLOCK) * places).sum(dim=1).tolist() if whole else []
        if whole < len(part):
            sums.append(int((part[whole:] * places[: len(part) - whole]).sum()))
        for each in sums:
            total = (total * _MIX + each) % (1 << 64)
    return total


@torch.no_grad()
def value_checksum(tensor: Tensor) -> Tensor:
    """Computes a checksum of a tensor's values, of 2 or 4 bytes each, whatever their order; zeros do not count. Never waits
    for a GPU."""
    words = tensor.detach().contiguous().view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    mixed = words.to(torch.int64) * _MIX
    return ((mixed ^ (mixed >> 32)) * _MIX).sum()
