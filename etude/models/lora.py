"""LoRA with `peft` (Hu et al. 2021, arXiv 2106.09685): W + (alpha / rank) · B A, where only A and B are trained.

Invariant: adapters are injected into the model's modules; the model stays the same object, so packing, engines and
optimizers see a model with few trainable weights. New adapters have B = 0 and change nothing, and with adapters disabled
(`without_adapters`) the model is the one that was loaded, bit for bit.

State dicts have the names of the model with adapters; `merged_weights` has those of the model without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from etude.errors import CheckpointError, ConfigError, MissingExtraError, one_line
from etude.models.quantized import dequantized, linear_layers, quantized_layers

if TYPE_CHECKING:
    from etude.options import TrainedModelOptions

ADAPTER_FOLDER = "lora_adapter"
_NAME = "default"  # peft's name of the only adapter
_FACTORS = (f"lora_A.{_NAME}.weight", f"lora_B.{_NAME}.weight")
_LINEAR = ("Linear", "Linear4bit")  # peft's classes of adapted linear layers
_PROBE_TOKENS = 4
_PREFIX = "base_model.model."  # of tensor names in peft's files


def add_adapters(model: Any, options: TrainedModelOptions, seed: int = 0) -> None:
    """Freezes `model` and adds adapters as configured by the `lora_*` keys; only these are trainable afterwards.

    Raises:
        MissingExtraError: peft is not installed.
        ConfigError: no module matches the target names, or a matching module is not a linear layer, is the head, or has no
            part in what the model computes.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtraError("model.lora_rank", "lora") from error
    names = list(options.target_modules)
    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        # peft's all-linear would include the experts and routers of mixtures.
        target_modules=[name for name, _ in linear_layers(model)] if names == ["all-linear"] else names,
        exclude_modules=options.exclude_modules,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(options.path),
    )
    model.requires_grad_(False)
    try:
        with torch.random.fork_rng():  # the same adapters on every rank; the global random state is unchanged
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ConfigError(f"model.target_modules={','.join(names)}: {one_line(error)}") from error
    if other := next((name for name, part in _layers(model) if type(part).__name__ not in _LINEAR), None):
        raise ConfigError(
            f"model.target_modules={','.join(names)}: {other} is no linear layer (the experts of a mixture are one tensor): "
            "name others, such as q_proj, or take all-linear"
        )
    if hasattr(model.get_output_embeddings(), "lora_A"):
        raise ConfigError(
            f"model.target_modules={','.join(names)}: the head cannot have an adapter, because log-probs are computed from "
            "its weight alone: leave it out, or take all-linear"
        )
    if idle := _idle_adapters(model):
        raise ConfigError(
            f"model.target_modules={','.join(names)}: {len(idle)} adapters get no gradient, the first is that of {idle[0]}: "
            f"the model does not use the layer; leave such layers out with model.exclude_modules={re.escape(idle[0])}"
        )


def _idle_adapters(model: Any) -> list[str]:
    """Returns the adapted layers of the text model that no gradient reaches, by one backward pass on a few tokens."""
    if next(model.parameters()).is_meta:  # the rank with the weights looks
        return []
    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    inside = {id(part) for part in text.modules()}
    layers = [(name, part) for name, part in _layers(model) if id(part) in inside]
    ids = torch.arange(_PROBE_TOKENS, device=next(model.parameters()).device)[None]
    with torch.enable_grad():
        output = model(input_ids=ids, use_cache=False)[0]
        tensors = [part.lora_B[_NAME].weight for _, part in layers]
        found = torch.autograd.grad(output.float().sum(), tensors, allow_unused=True)
    return [name for (name, _), gradient in zip(layers, found) if gradient is None]


def has_adapters(model: Any) -> bool:
    """Whether `add_adapters` was called on the model, or on the backbone of a value model."""
    return next(_layers(model), None) is not None


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Disables adapters inside: the model computes as it was loaded, and none of its adapters is trainable. Does nothing for
    a model without adapters."""
    layers = [layer for _, layer in _layers(model)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trained:
            parameter.requires_grad_()


def merged_weights(
    model: Any,
    weights: Mapping[str, Tensor] | None = None,
    gather: Callable[[Tensor, bool], Tensor] = lambda tensor, exact: tensor,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the state dict of the model without adapters: these are merged into the weights, in float32. Quantised weights
    are dequantised to the dtype of the other weights.

    Args:
        weights: a state dict of the model; None: its current one.
        gather: returns the whole tensor of a sharded one; its second argument is true for terms of a sum, which must not be
            rounded first.
    """
    weights = model.state_dict() if weights is None else weights
    layers = dict(_layers(model))
    quantized = {f"{name}.weight": layer for name, layer in quantized_layers(model)}
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    for name, tensor in weights.items():
        if is_factor(name) or name.rpartition(".weight.")[0] + ".weight" in quantized:  # a quantised weight's scales
            continue
        if name in quantized:
            tensor = dequantized(quantized[name]).to(dtype)
        layer = layers.get(owner := name.removesuffix(".base_layer.weight"))
        whole = gather(tensor, layer is not None)
        if layer is not None:
            first, second = (gather(weights[f"{owner}.{factor}"], True).float() for factor in _FACTORS)
            whole = torch.add(whole, second @ first, alpha=layer.scaling[_NAME]).to(whole.dtype)
        yield name.replace(".base_layer.", "."), whole


def save_adapters(model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Writes the adapters as a folder that `peft.PeftModel.from_pretrained` loads; `weights`: see `merged_weights`.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    model = getattr(model, "backbone", model)
    own = model.state_dict() if weights is None else {n.removeprefix("backbone."): t for n, t in weights.items()}
    factors = {peft_name(name): tensor.detach().cpu().contiguous() for name, tensor in own.items() if is_factor(name)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model.peft_config[_NAME].save_pretrained(str(folder))
        save_file(factors, folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot save the adapters: {one_line(error)}") from error


def is_factor(name: str) -> bool:
    """Whether this is the name of an adapter's tensor."""
    return name.endswith(_FACTORS)


def peft_name(name: str) -> str:
    """Returns the name of an adapter's tensor in peft's files."""
    return f"{_PREFIX}{name.replace(f'.{_NAME}.', '.')}"


def adapter_config(model: Any) -> str:
    """Returns the adapter's configuration as JSON, as in peft's adapter_config.json."""
    return json.dumps(model.peft_config[_NAME].to_dict(), default=list)


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields the modules with adapters, with their names; does not need peft if there are none."""
    return ((name, part) for name, part in model.named_modules() if hasattr(part, "lora_A"))
