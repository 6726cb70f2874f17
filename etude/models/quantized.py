"""QLoRA (Dettmers et al. 2023, arXiv 2305.14314) with `bitsandbytes`: a frozen 4-bit base model under LoRA adapters.

Invariant: every linear layer except the head has its weight in 4-bit NormalFloat, with doubly quantised scales, and computes
with `dequantized(layer)`, the same in training, scoring and sampling; all other weights (embeddings, norms, biases, the
head, the experts of a mixture) are as loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from etude.errors import ConfigError, MissingExtraError, one_line

_KEY = "model.quantization"


def quantize(model: Any, kind: str, device: torch.device | str) -> None:
    """Quantises the linear layers of a loaded `model` in place and moves them to `device`. Call `check_quantization`
    first."""
    for name, part in linear_layers(model):
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, _quantized(part, kind, device))
    model.is_loaded_in_4bit = True  # peft checks this attribute


def check_quantization(kind: str, device: torch.device | str) -> None:
    """Checks that a quantised layer can run forward and backward on `device`.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
        ConfigError: it cannot compute on `device`.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingExtraError(f"{_KEY}={kind}", "bitsandbytes") from error
    try:
        layer = _quantized(torch.nn.Linear(64, 64, bias=False), kind, device)
        layer(torch.ones(2, 64, device=device, requires_grad=True)).sum().backward()
    except Exception as error:  # without kernels for a device, the library raises anything
        version = bitsandbytes.__version__
        raise ConfigError(
            f"{_KEY}={kind}: bitsandbytes {version} cannot compute on {device}: {one_line(error)}"
        ) from error


def linear_layers(model: Any) -> list[tuple[str, torch.nn.Linear]]:
    """Returns the linear layers except the head, with their names. A router that a family derives from a linear layer is
    none: it returns more than a product."""
    head = model.get_output_embeddings()
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    family = "transformers.models."
    return [(name, part) for name, part in layers if part is not head and not type(part).__module__.startswith(family)]


def quantized_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields the layers that `quantize` replaced, with their names; does not need bitsandbytes if there are none."""
    return ((n, part) for n, part in model.named_modules() if hasattr(part._parameters.get("weight"), "quant_state"))


def dequantized(layer: Any) -> Tensor:
    """Returns the weight (out, in) that a quantised layer computes with."""
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight


def _quantized(layer: torch.nn.Linear, kind: str, device: torch.device | str) -> Any:
    from bitsandbytes.nn import Linear4bit, Params4bit

    made = Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type=kind, device="meta")
    made.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type=kind, module=made).to(device)
    if layer.bias is not None:
        made.bias = torch.nn.Parameter(layer.bias.data.to(device), requires_grad=False)
    made.support_avx512bf16_for_cpu = False  # this kernel is for inference only and rounds to bfloat16
    return made.train(layer.training)
