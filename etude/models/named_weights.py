"""Weights by name: how they travel from a trained model, sharded or not, to a copy of its own that an engine samples from.

Invariant: names are those of the model without adapters, which are merged into the weights; tied weights come once; a copy
either equals what was sent, tensor by tensor, in the copy's precision, or the error names the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from etude.errors import EtudeError
from etude.models.lora import merged_weights

Chunk = list[tuple[str, Tensor]]
_BUCKET = 256 << 20  # bytes
_BLOCK = 1 << 20  # elements of a checksum at once
_MIX = 0x9E3779B97F4A7C1  # odd, so that no two places weigh alike
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor (collective over the ranks of its mesh); another one as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return whole


def shard_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """`whole`, which all ranks have, sharded as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to(tensor.device)


@torch.no_grad()
def full_state(model: Any, *, dtype: torch.dtype | None = None, bucket_bytes: int = _BUCKET) -> Iterator[Chunk]:
    """Chunks of (name, full tensor) of at most `bucket_bytes`, or of one larger tensor.

    All ranks that hold a part of a sharded model have to iterate to the end, since gathering a tensor is collective; all of
    them get the tensors. Those of a model that is not sharded may be the model's own: copy them before it is trained on.

    Args:
        dtype: what floating-point tensors are rounded to, before they are gathered where possible; None: as they are.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    chunk: Chunk = []
    room = bucket_bytes
    for name, tensor in merged_weights(
        model, own_weights(model), lambda t, exact: full_tensor(t if exact else cast(t))
    ):
        whole = cast(tensor).detach()
        if chunk and whole.nbytes > room:
            yield chunk
            chunk, room = [], bucket_bytes
        chunk.append((name, whole))
        room -= whole.nbytes
    if chunk:
        yield chunk


def own_weights(model: Any) -> dict[str, Tensor]:
    """The tensors of the model's state dictionary, tied ones under their first name alone."""
    kept: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        kept.setdefault(id(tensor), (name, tensor))
    return dict(kept.values())


@torch.no_grad()
def gather_weights(model: Any, dtype: torch.dtype, keep: bool = True) -> dict[str, Tensor]:
    """`own_weights` of a sharded model as whole tensors on the CPU, rounded to `dtype` but for a value head (collective);
    without `keep`, nothing."""
    gathered: dict[str, Tensor] = {}
    prefix = "backbone." if hasattr(model, "backbone") else ""
    for name, tensor in own_weights(model).items():
        whole = full_tensor(tensor.to(dtype) if name.startswith(prefix) else tensor)
        if keep:
            gathered[name] = whole.detach().to("cpu", copy=True)  # of a mesh of one rank it is the weight itself
    return gathered


@torch.no_grad()
def copy_weights(model: Any, chunks: Iterable[Chunk]) -> None:
    """Copies chunks of `full_state` into the weights of `model`, in place, rounded to its precision.

    Raises:
        EtudeError: `model` has no tensor of a name, or one of another shape; one of its own was not sent; or, after all were
            copied, one differs from what was sent. Names the tensor.
    """
    own: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    sent: dict[str, int] = {}
    for chunk in chunks:
        for name, tensor in chunk:
            if name not in own:
                raise EtudeError(f"weight sync: the engine's model has no tensor '{name}'")
            if own[name].shape != tensor.shape:
                raise EtudeError(
                    f"weight sync: '{name}' has shape {tuple(tensor.shape)}, in the engine's model {tuple(own[name].shape)}"
                )
            rounded = tensor.to(own[name].dtype)
            own[name].copy_(rounded)
            sent[name] = checksum(rounded)
    reached = {id(own[name]) for name in sent}
    for name, tensor in own.items():
        if id(tensor) not in reached:
            raise EtudeError(f"weight sync: '{name}' of the engine's model was not sent")
    for name, value in sent.items():
        if checksum(own[name]) != value:
            raise EtudeError(f"weight sync: '{name}' is not in the engine's model what was sent")


def weight_checksums(model: Any) -> dict[str, int]:
    """The checksum of each of `own_weights`."""
    return {name: checksum(tensor) for name, tensor in own_weights(model).items()}


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Of the bits of a tensor and where they are; whatever device it is on."""
    bits = tensor.detach().contiguous().view(-1)
    bits = bits.view(_INTEGERS[bits.element_size()])
    places = torch.arange(1, min(len(bits), _BLOCK) + 1, device=bits.device) * _MIX
    total = 0
    for block in bits.split(_BLOCK):
        total = total * _MIX + int((block.long() * places[: len(block)]).sum())
    return total % (1 << 64)
