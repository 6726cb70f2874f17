"""`activation_bytes`: how much memory the backward pass of a model needs per token, without the model.

Invariant: nothing is computed or allocated. The first layers of the model's own code run on tensors without values, and what
autograd would keep of them is added up, so the answer holds for any family and dtype that packing accepts. On a GPU that is
what the meta device keeps, whose attention is the GPU's.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from etude.models.checkpointing import checkpoint_layers
from etude.options.model_path import local_folder

if TYPE_CHECKING:
    import torch

    from etude.options import ModelOptions

_TOKENS = 64  # of the probe
_GRADIENTS = 0.35  # of a layer's activations: counted at the largest moment of its backward pass, Qwen2's


@dataclass(frozen=True)
class Footprint:
    """Bytes per packed token: kept until the backward pass (`kept`), by layers (`layers`, a part of it), and what exists
    beside `kept` while a layer is differentiated (`working`)."""

    kept: float
    layers: float
    working: float


def activation_bytes(
    options: ModelOptions, dtype: torch.dtype, *, checkpointing: bool, on_gpu: bool = False
) -> Footprint | None:
    """Returns the footprint of the causal LM in `options.path`, a local folder. On a GPU LoRA keeps less, because frozen
    weights need no inputs; on a CPU it is counted as if all weights were trained. None if it cannot be told, as for mixtures
    of experts, whose shapes depend on the data."""
    folder = local_folder(str(options.path))
    try:
        return _measure(replace(options, path=str(folder)), dtype, checkpointing, on_gpu) if folder else None
    except Exception:  # an unknown architecture can fail in any way, and loading it will say how
        return None


@lru_cache(maxsize=16)
def _measure(options: ModelOptions, dtype: torch.dtype, checkpointing: bool, on_gpu: bool) -> Footprint:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        str(options.path), local_files_only=True, trust_remote_code=options.trust_remote_code
    )
    one, two = (_kept(config, layers, options, dtype, False, on_gpu) for layers in (1, 2))
    again = [_kept(config, layers, options, dtype, True, on_gpu) for layers in (1, 2)] if checkpointing else [one, two]
    by_layers = config.num_hidden_layers * (again[1] - again[0])
    working = (two - one) * (checkpointing + _GRADIENTS if on_gpu else 2)  # a CPU's allocator leaves holes
    return Footprint(2 * one - two + by_layers, by_layers, working)


def _kept(
    config: Any, layers: int, options: ModelOptions, dtype: torch.dtype, checkpointing: bool, on_gpu: bool
) -> float:
    """Bytes per token that autograd keeps of a model with this many layers; weights are not counted."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    from etude.models.lora import add_adapters
    from etude.models.packed import ATTENTION_NAME, CausalSequences, packed_hidden

    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    kept: dict[
        int, torch.Tensor
    ] = {}  # by storage; the tensors keep the storages alive, so that no number is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    device = torch.device("meta" if on_gpu else "cpu")
    with nullcontext() if on_gpu else FakeTensorMode():
        with device:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype).train()
            if on_gpu and options.lora_rank:
                add_adapters(model, options)
                model.to(dtype)
        if checkpointing:
            checkpoint_layers(model)
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        ids, layout = torch.zeros(_TOKENS, dtype=torch.long, device=device), CausalSequences([_TOKENS])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = packed_hidden(model, ids, layout.position_ids().to(device), layout)
        del hidden
    sizes = (tensor.untyped_storage().nbytes() for number, tensor in kept.items() if number not in weights)
    return sum(sizes) / _TOKENS
