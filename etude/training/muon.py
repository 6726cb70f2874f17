"""`Muon` in float32.

`torch.optim.Muon` orthogonalises its updates in bfloat16, which CPUs without bfloat16 units emulate: 25 times slower than
float32 on a common server CPU, and most of a small model's training step. This subclass keeps hyper-parameters, state and
formula, but computes in float32 and batches matrices of the same shape. For sharded matrices the momentum is sharded, too;
every rank gathers the whole matrices and orthogonalises them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from etude.models.named_weights import full_tensor, shard_like


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` (Jordan et al. 2024, "Muon: an optimizer for hidden layers") for two-dimensional parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                updates = orthogonalise(
                    torch.stack([full_tensor(self._momentum(p, group)) for p in parameters]),
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                )
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, updates):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(shard_like(update.to(parameter.dtype), parameter), alpha=-scale)

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Updates the momentum buffer; returns the direction before orthogonalisation."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer.clone()


def orthogonalise(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton–Schulz iteration towards U Vᵀ of each matrix U S Vᵀ; (batch, rows, columns) in and out, at least float32."""
    a, b, c = coefficients
    x = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.transpose(1, 2) if tall else x
