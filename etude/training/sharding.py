"""Sharding a model over ranks: FSDP2 (`fully_shard`), HSDP, and tensor parallelism of the decoder layers.

Invariant: a sharded model computes the same as an unsharded one. Its gradients are sums over the ranks, in float32: gloo's
average is a sum (PyTorch issue 162338), and losses are already divided by the counts of the whole mini-batch. Its weights
are float32 shards whatever dtype it computes in, so that an optimizer needs no master weights.

Every forward pass is collective, so all ranks must run the same number: see `run_forward` and `count_passes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_map_only

from etude.errors import ConfigError
from etude.models.lora import has_adapters
from etude.models.vision import Vision
from etude.options import FSDPOptions

T = TypeVar("T")

_WHOLE_GRADIENT_BYTES = 2 << 30
_BUCKET_BYTES = 64 << 20  # gradients are summed in buffers of about this size
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),  # norms of heads
}
"""The styles of Transformers' plans for tensor parallelism that are split here."""


def build_mesh(options: FSDPOptions, world_size: int, device: torch.device) -> DeviceMesh:
    """Builds the device mesh (replicate, shard, tensor).

    Raises:
        ConfigError: as `mesh_shape`.
        RuntimeError: `torch.distributed` is not initialised.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "several ranks cannot share a model in one process: start each in its own, with torch.distributed initialised"
        )
    if options.tensor_parallel_size > 1:  # weights are gathered in two steps, about which PyTorch warns
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    names = ("replicate", "shard", "tensor")
    return init_device_mesh(device.type, mesh_shape(options, world_size), mesh_dim_names=names)


def mesh_shape(options: FSDPOptions, world_size: int) -> tuple[int, int, int]:
    """Returns the number of replicas, of ranks that shard each, and of tensor-parallel ranks.

    Raises:
        ConfigError: they do not divide the number of ranks.
    """
    tensor = options.tensor_parallel_size
    shard = world_size // tensor if options.fsdp_size == -1 else options.fsdp_size
    if shard < 1 or world_size % (shard * tensor):
        raise ConfigError(
            f"fsdp_config.fsdp_size={options.fsdp_size} and tensor_parallel_size={tensor} do not divide {world_size} ranks"
        )
    return world_size // (shard * tensor), shard, tensor


def shard_model(model: Any, options: FSDPOptions, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shards `model` over `mesh`, in place: each decoder layer separately, and the rest together. The first rank has the
    weights, on the others they may be on the meta device: each layer's are sent just before it is sharded, so that no other
    rank ever holds the whole model. It computes in `dtype`, frozen weights are stored in it, and a value head computes in
    float32.

    Raises:
        ConfigError: the model cannot be sharded in this way.
    """
    body = getattr(model, "backbone", model)
    if Vision.of(model.config) is not None:
        raise ConfigError("strategy=fsdp2: vision-language models cannot be sharded yet: write strategy=ddp")
    split = _plan_split(model, body, mesh["tensor"].size()) if mesh["tensor"].size() > 1 else {}
    for parameter in body.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    device, filled = torch.device(mesh.device_type), dict[int, Tensor]()
    several = mesh["replicate"].size() > 1
    given: dict[str, Any] = {
        "mesh": mesh["replicate", "shard"] if several else mesh["shard"],
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if options.param_offload
        else OffloadPolicy(),
    }
    half = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32))
    kinds = set(body._no_split_modules or ())
    for layer in [part for part in body.modules() if type(part).__name__ in kinds]:
        _fill(layer, device, filled)
        if layer in split:
            parallelize_module(layer, mesh["tensor"], split[layer])
        fully_shard(layer, reshard_after_forward=options.reshard_after_forward, mp_policy=half, **given)
    _fill(model, device, filled)
    if body is not model:
        fully_shard(model.head, **given)
    fully_shard(model, mp_policy=half, **given)
    model.run_forward = MethodType(_run, model)
    register_fsdp_forward_method(model, "run_forward")
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    with torch.no_grad():
        # FSDP fixes what is trainable in its first pass, which must not be one with adapters disabled.
        run_forward(model, lambda: None)


@torch.no_grad()
def _fill(part: nn.Module, device: torch.device, filled: dict[int, Tensor]) -> None:
    """Gives a part of a model the first rank's parameters and buffers, on `device` (collective). `filled` has those of
    earlier parts, so that tied ones stay tied."""
    for module in part.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if id(tensor) not in filled:
                    whole = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
                    dist.broadcast(whole, 0)
                    if isinstance(tensor, nn.Parameter):
                        whole = nn.Parameter(whole, requires_grad=tensor.requires_grad)
                    filled[id(tensor)] = filled[id(whole)] = whole
                held[name] = filled[id(tensor)]  # type: ignore[assignment]


def _run(model: Any, compute: Callable[[], T]) -> T:
    """Clones outputs that are views, because in-place operations on views would lose FSDP's hooks."""
    found: T = tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor._is_view() else tensor, compute())
    return found


def is_sharded(model: Any) -> bool:
    """Whether `shard_model` was called on the model."""
    return isinstance(model, FSDPModule)


def compute_device(model: Any) -> torch.device:
    """Returns the device on which forward passes of the model run."""
    parameter = next(model.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def run_forward(model: Any, compute: Callable[[], T]) -> T:
    """Runs `compute()`, a forward pass through any modules of `model`; the weights of a sharded one are gathered inside."""
    if not is_sharded(model):
        return compute()
    found: T = model.run_forward(compute)
    if not torch.is_grad_enabled():
        model.reshard()  # without a backward pass, nothing else does, and the next pass would reuse stale weights
    return found


def delay_sums(model: Any, last: bool) -> None:
    """Says, before each pass with a backward pass, whether it is the last before the optimizer's step: until then, whole
    gradients of up to `_WHOLE_GRADIENT_BYTES` (LoRA's) are added up on each rank and then reduced once; larger ones are
    reduced after each pass to the ranks that share a copy, and only at the end summed over copies. Does nothing for an
    unsharded model."""
    if is_sharded(model):
        whole = sum(4 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        model.set_requires_gradient_sync(last or whole > _WHOLE_GRADIENT_BYTES)
        model.set_requires_all_reduce(last)


def count_passes(model: Any, own: int) -> int:
    """Returns the number of forward passes that every rank must run: the maximum of `own` over the ranks. Call it before the
    first pass."""
    if not is_sharded(model):
        return own
    count = torch.tensor(own, device=compute_device(model))
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return int(count)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


def _plan_split(model: Any, body: Any, size: int) -> dict[nn.Module, dict[str, ParallelStyle]]:
    """How attention heads and the feed-forward width of each layer are split over `size` ranks, by Transformers' plan for
    the family; norms, embedding and head are replicated over them."""
    key, config = f"fsdp_config.tensor_parallel_size={size}", model.config
    if has_adapters(model):
        raise ConfigError(f"{key} does not go with LoRA: write 1")
    named = getattr(config, "base_model_tp_plan", None) or {}
    styles = {name.removeprefix("layers.*."): style for name, style in named.items() if name.startswith("layers.*.")}
    foreign = sorted({*styles.values()} - _STYLES.keys()) if styles else ["no layers"]
    if foreign:
        raise ConfigError(f"{key}: Transformers' plan for type '{config.model_type}' has {foreign[0]}: write 1")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name, size) % size:
            raise ConfigError(f"{key} does not divide the model's {name}={getattr(config, name)}")
    plans = dict[nn.Module, dict[str, ParallelStyle]]()
    for layer in body.get_decoder().layers:
        plans[layer] = {name: _STYLES[styles[name]]() for name, _ in layer.named_modules() if name in styles}
        for name, weight in layer.named_parameters():
            if weight.ndim > 1 and name.rpartition(".")[0] not in styles:
                raise ConfigError(
                    f"{key}: Transformers' plan for type '{config.model_type}' leaves out {name}: write 1"
                )
    return plans


# -- gradients ---------------------------------------------------------------------------------------------------------


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sums the gradients of an unsharded model over the ranks, in place, many in one buffer: the result is the gradient of
    one rank with all the rows. A parameter without a gradient on any rank keeps none, and its optimizer state does not
    change.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "several ranks cannot learn together in one process: start each in its own, with torch.distributed initialised"
        )
    reached = torch.tensor([int(p.grad is not None) for p in parameters], device=parameters[0].device)
    dist.all_reduce(reached)
    buckets: dict[tuple[Any, ...], list[list[Tensor]]] = {}  # of one dtype and device
    for parameter, ranks in zip(parameters, reached.tolist()):
        if not ranks:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        alike = buckets.setdefault((parameter.grad.dtype, parameter.grad.device), [[]])
        if sum(gradient.nbytes for gradient in alike[-1]) >= _BUCKET_BYTES:
            alike.append([])
        alike[-1].append(parameter.grad)
    for bucket in chain.from_iterable(buckets.values()):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket])):
            gradient.copy_(part.view_as(gradient))


def share_of(tensor: DTensor) -> float:
    """1 / the number of ranks that hold the same shard: the factor with which sums over shards are summed over all ranks."""
    parts = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements):
        parts *= 1 if isinstance(placement, Replicate) else size
    return parts / dist.get_world_size()


def clip_sharded(parameters: Sequence[nn.Parameter], limit: float) -> float:
    """Clips gradients to the norm `limit`; returns the norm of the whole gradient, the same on all ranks."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device_mesh.device_type)  # type: ignore[attr-defined]
    for gradient in gradients:
        assert isinstance(gradient, DTensor)
        norm = torch.linalg.vector_norm(gradient.to_local())
        square += norm.double().to(square.device) ** 2 * share_of(gradient)
    dist.all_reduce(square)
    norm = float(square.sqrt())
    if norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / (norm + 1e-6))
    return norm
