"""Mixed precision: the model computes in bfloat16 or float16, the optimizer updates float32 master weights.

Invariant: an update too small for the model's precision is not lost: it accumulates in the float32 weights, of which the
model's are rounded copies. Gradients are accumulated in float32; only within one backward pass do they have the model's
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_HALF = (torch.bfloat16, torch.float16)
_MAX_SCALE = 2.0**24


def round_weights(module: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Rounds the weights of `module` to `dtype` in place, and returns the trainable ones unrounded. Buffers (rotary
    frequencies) and quantised weights are not changed."""
    exact = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            exact[parameter] = parameter.data
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return exact


class MasterWeights:
    """Float32 master weights for trainable parameters in lower precision; other parameters are their own masters."""

    def __init__(
        self, model: nn.Module, exact: Mapping[nn.Parameter, Tensor] | None = None, on_cpu: bool = False
    ) -> None:
        """`exact`: the parameters' values before rounding (see `round_weights`). `on_cpu`: masters are on the CPU; then
        parameters in float32 on another device have some, too."""
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in model.parameters():
            place = torch.device("cpu") if on_cpu else parameter.device
            if parameter.requires_grad and (parameter.dtype in _HALF or place != parameter.device):
                value = (exact or {}).get(parameter, parameter.detach())
                master = nn.Parameter(value.to(place, torch.float32, copy=value.dtype in _HALF))
                self._masters[parameter] = master
                parameter.register_post_accumulate_grad_hook(_add_to(master))

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the tensor that the optimizer updates for `parameter`."""
        return self._masters.get(parameter, parameter)

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the float32 weights into the model, rounded."""
        for parameter, master in self._masters.items():
            parameter.copy_(master)


def _add_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to(master.device).to(torch.float32)  # the CPU converts: half as much crosses
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return add


@dataclass
class DynamicLossScale:
    """Dynamic loss scaling, which keeps small gradients representable in float16 (Micikevicius et al. 2018, arXiv
    1710.03740, section 3.2): halved after a non-finite gradient, doubled after `interval` consecutive finite ones."""

    value: float = 2.0**16
    interval: int = 2_000
    finite_steps: int = 0

    @staticmethod
    def for_model(model: nn.Module, dtype: torch.dtype | None = None) -> DynamicLossScale | None:
        """Returns a loss scale if trainable parameters compute in float16, else None. `dtype`: what they compute in; None:
        their own dtype."""
        kinds = {dtype or parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        return DynamicLossScale() if torch.float16 in kinds else None

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divides gradients by the scale."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self.value)

    def note(self, finite: bool) -> None:
        """Adapts the scale after a step."""
        if not finite:
            self.value, self.finite_steps = max(self.value / 2, 1.0), 0
            return
        self.finite_steps += 1
        if self.finite_steps >= self.interval:
            self.value, self.finite_steps = min(self.value * 2, _MAX_SCALE), 0

    def state(self) -> dict[str, Tensor]:
        """Returns the state for `load`."""
        return {"value": torch.tensor(self.value), "finite_steps": torch.tensor(self.finite_steps)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restores a saved `state`."""
        self.value, self.finite_steps = float(state["value"]), int(state["finite_steps"])
