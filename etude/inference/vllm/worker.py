"""Worker extensions that load new weights in place, inside vLLM's worker processes (`--worker-extension-cls`).

vLLM imports this module before it builds the model, and adds the class's methods to its worker. On a CPU the import also
replaces the matrix product of linear layers: when it loads a model, vLLM packs their weights into its own format and drops
the originals or keeps them unused, so that loading weights later reports success but has no effect on the computation.
`torch.nn.functional.linear` computes with the parameter itself; experts are packed anew after each load. Other devices are
left unchanged.

This module needs vLLM and is never imported by the trainer.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etude.inference.vllm.loaded import WatchedLoad, parameter_checksums

_DISPATCH = "dispatch_cpu_unquantized_gemm"
_USERS = ("utils", "linear", "vocab_parallel_embedding")  # in vllm.model_executor.layers; some import it by name


def compute_with_parameters() -> None:
    """Replaces vLLM's packed matrix products on the CPU, except for weights that are not matrices."""
    from importlib import import_module

    modules = [import_module(f"vllm.model_executor.layers.{name}") for name in _USERS]
    packed = getattr(modules[0], _DISPATCH)

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            packed(layer, remove_weight)

    for module in modules:
        if hasattr(module, _DISPATCH):
            setattr(module, _DISPATCH, dispatch)


class WeightReceiver:
    """Methods that `collective_rpc` calls by name. Those that load weights return the number of tensors loaded, and
    raise ValueError if a parameter is not what was sent."""

    model_runner: Any

    def etude_load_folder(self, folder: str) -> int:
        """Loads the safetensors files of a Hugging Face checkpoint into the model in place."""
        return self._etude_load(_tensors(Path(folder)))

    def etude_checksums(self) -> dict[str, str]:
        """Returns the checksums of this worker's parameters, under vLLM's names."""
        return parameter_checksums(self.model_runner.get_model())

    def _etude_load(self, weights: Iterator[tuple[str, Tensor]]) -> int:
        model = self.model_runner.get_model()
        watched = WatchedLoad(model)
        with torch.inference_mode():
            if _on_cpu():
                model.load_weights(watched.watch(weights))
                _pack_experts(model)
            else:  # kernels have rearranged what they loaded (experts' w1 and w3 are swapped): vLLM's reload does so again
                self.model_runner.reload_weights(weights_iterator=watched.watch(weights))
            watched.check()
        return watched.tensors


class SharedWeightReceiver(WeightReceiver):
    """Also loads tensors from CUDA IPC handles. Only for an engine started by this program, never for a server: handles
    are pickled, and anyone who can send a pickle can run code."""

    def etude_load_handles(self, pickled: str) -> int:
        """Loads tensors; `pickled`: base64 of a pickled list [(name, result of
        `torch.multiprocessing.reductions.reduce_tensor`)]."""
        handles = pickle.loads(base64.b64decode(pickled))
        return self._etude_load((name, rebuild(*arguments)) for name, (rebuild, arguments) in handles)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no safetensors files there")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (no mapping)
                yield name, opened.get_tensor(name)


def _pack_experts(model: Any) -> None:
    """Packs loaded experts for the CPU's kernels, in the place where vLLM's loader put them."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


if _on_cpu():
    compute_with_parameters()
