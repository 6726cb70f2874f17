"""Gradient checkpointing of a model's layers, with what is kept in the CPU's memory if asked.

Invariant: only the inputs of layers are kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from etude.models.heap import return_large_blocks

if TYPE_CHECKING:
    import torch


def checkpoint_layers(model: Any, offload: bool = False) -> None:
    """Enables gradient checkpointing: of a layer, only the input is kept for the backward pass; with `offload`, in the CPU's
    memory."""
    if next(model.parameters()).device.type == "cpu":
        return_large_blocks()
    # Newer versions of Transformers have the first name, older ones the second.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.disable_input_require_grads()  # its hook is for reentrant checkpointing, and slows down the engine
    for part in model.modules() if offload else ():
        if hasattr(part, "_gradient_checkpointing_func"):
            part._gradient_checkpointing_func = _offloaded(part._gradient_checkpointing_func)


def _offloaded(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Copies do not make the host wait: their source and destination are used in the order of one stream."""
    import torch

    def leave(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        return tensor.device, tensor.to("cpu", non_blocking=True)

    def come_back(kept: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        return kept[1].to(kept[0], non_blocking=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(leave, come_back):
            return checkpoint(*args, **kwargs)

    return run
