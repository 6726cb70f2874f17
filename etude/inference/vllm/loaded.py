"""`WatchedLoad`: verifies by checksum that vLLM's model has the weights that its loader was given.

Invariant: a matrix is compared if the model has it under its own name, or as rows of a fused matrix (q, k and v in
`qkv_proj`, gate and up in `gate_up_proj`). Vectors, which a loader may transform, experts, which kernels rearrange, and
matrices sharded over several ranks are left to the weight probe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from etude.models.named_weights import checksum


class WatchedLoad:
    """`model`: a vLLM model, whose `packed_modules_mapping` names its fused modules."""

    def __init__(self, model: Any) -> None:
        self._model, self._parameters = model, dict(model.named_parameters())
        packed = getattr(model, "packed_modules_mapping", None) or {}
        self._fused = {part: (whole, place) for whole, parts in packed.items() for place, part in enumerate(parts)}
        self.tensors = 0  # watched so far
        self._sent: dict[str, dict[int, tuple[str, int, int]]] = {}  # parameter → place in it → (name, rows, checksum)

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
        return compared


def parameter_checksums(model: Any) -> dict[str, str]:
    """Returns the checksums of all parameters, by the model's own names."""
    return {name: f"{checksum(parameter):x}" for name, parameter in model.named_parameters()}
