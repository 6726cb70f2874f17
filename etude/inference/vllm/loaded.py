"""`WatchedLoad`: verifies by checksum that vLLM's model has the weights that its loader was given.

Invariant: a matrix is compared if the model has it under its own name, or as rows of a fused matrix (q, k and v in
`qkv_proj`, gate and up in `gate_up_proj`). An expert, whose matrices kernels rearrange, must have the values that were
sent, wherever they lie. Vectors, which a loader may transform, padded experts, and what ranks share are left to the weight
probe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from etude.models.named_weights import checksum, value_checksum

_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.\w+\.weight")
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)  # others are scaled


class WatchedLoad:
    """`model`: a vLLM model, whose `packed_modules_mapping` names its fused modules."""

    def __init__(self, model: Any) -> None:
        self._model, self._parameters = model, dict(model.named_parameters())
        packed = getattr(model, "packed_modules_mapping", None) or {}
        self._fused = {part: (whole, place) for whole, parts in packed.items() for place, part in enumerate(parts)}
        self.tensors = 0  # watched so far
        self._sent: dict[str, dict[int, tuple[str, int, int]]] = {}  # parameter → place in it → (name, rows, checksum)
        # layer → expert → (elements, checksum) of each of its matrices
        self._experts: dict[str, dict[int, list[tuple[int, Tensor]]]] = {}

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields `weights` unchanged, for the model's loader, and records their checksums."""
        for name, tensor in weights:
            self.tensors += 1
            owner, _, kind = name.rpartition(".")
            rest, _, module = owner.rpartition(".")
            whole, place = self._fused.get(module, (module, 0))
            target = f"{rest}.{whole}.{kind}" if rest else f"{whole}.{kind}"
            own = self._parameters.get(target)
            if own is not None and own.ndim == tensor.ndim == 2 and own.shape[1] == tensor.shape[1]:
                total = checksum(tensor.to(own.device, own.dtype))
                self._sent.setdefault(target, {})[place] = name, len(tensor), total
            expert = _EXPERT.fullmatch(name)
            if expert and (owned := _experts_of(self._parameters, expert[1])):
                values = value_checksum(tensor.to(owned[0].device, owned[0].dtype))
                self._experts.setdefault(expert[1], {}).setdefault(int(expert[2]), []).append((tensor.numel(), values))
            yield name, tensor

    def check(self) -> int:
        """Compares the checksums after the load; returns how many tensors were compared.

        Raises:
            ValueError: a tensor in the model differs from the one sent; names it.
        """
        parameters, compared = dict(self._model.named_parameters()), 0
        for target, parts in self._sent.items():
            rows = sum(size for _, size, _ in parts.values())
            fused = target.rpartition(".")[0].rpartition(".")[2] in {whole for whole, _ in self._fused.values()}
            if rows > len(parameters[target]) or (fused and rows != len(parameters[target])):
                continue  # sharded over several ranks; an unfused matrix (an embedding) may be padded with rows
            start = 0
            for _, (name, size, total) in sorted(parts.items()):
                if checksum(parameters[target][start : start + size]) != total:
                    raise ValueError(f"'{name}' is not in the engine's '{target}' what was sent")
                start, compared = start + size, compared + 1
        for layer, experts in self._experts.items():
            owned, numbers = _experts_of(parameters, layer), sorted(experts)
            size = sum(each[0].numel() for each in owned)
            parted = any(len(each) != len(numbers) for each in owned)
            if parted or any(sum(count for count, _ in experts[number]) != size for number in numbers):
                continue  # on several ranks, or padded
            sent = torch.stack([torch.stack([total for _, total in experts[number]]).sum() for number in numbers])
            found = torch.stack([value_checksum(each[number]) for number in numbers for each in owned])
            wrong = (sent != found.view(len(numbers), -1).sum(1)).nonzero()
            if len(wrong):
                raise ValueError(f"expert {int(wrong[0])} of '{layer}' is not in the engine what was sent")
            compared += sum(len(experts[number]) for number in numbers)
        return compared


def _experts_of(parameters: dict[str, Any], layer: str) -> list[Tensor]:
    """The matrices of all experts of a layer: (experts, rows, columns) each."""
    return [p for name, p in parameters.items() if name.startswith(f"{layer}.") and p.ndim == 3 and p.dtype in _PLAIN]


def parameter_checksums(model: Any) -> dict[str, str]:
    """Returns the checksums of all parameters, by the model's own names."""
    return {name: f"{checksum(parameter):x}" for name, parameter in model.named_parameters()}
