"""Matrix products of the engine's steps on a CPU, with weights that oneDNN has reordered once.

PyTorch's `linear` has MKL reorder a weight in every call: a quarter of the time of a decode step. oneDNN takes a weight that
was reordered before (`docs/engines.md` has the gain). The reordered copy takes as much memory as the weights. A product of
one or two tokens does without it, as weight times tokens: it only reads the weight, which MKL does fastest in this order.

Invariant: outside a step the model is untouched, and inside one only inference mode, the engine's, uses the copy: another
thread's forward pass computes as ever. Which products use the copy depends on their shape and type alone, never on a clock,
so a repeated run computes the same bits. The copy must be dropped when the weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORTH_REORDERING = 100_000
"""Elements of a weight from which on these products are faster."""
_FEW = 2  # tokens up to which a product reads the weight as it is
_AMORTISED = 2000  # tokens; computing them takes more than 30 times as long as reordering the weights
_HINT = 64  # tokens of the products that the order is chosen for


class PrepackedLinears:
    """The reordered weights of one model's large float32 linear layers; see the module's docstring."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._forwards: dict[nn.Linear, Callable[[Tensor], Tensor]] | None = None
        self._tokens = 0

    @contextmanager
    def used(self, tokens: int) -> Iterator[None]:
        """Has the model's layers use their reordered weights, which are made if need be, for a step of `tokens` tokens."""
        if self._forwards is None:
            self._forwards, self._tokens = {part: _reordered(part) for part in _worthwhile(self._model)}, 0
        self._tokens += tokens
        for part, forward in self._forwards.items():
            vars(part)["forward"] = forward
        try:
            yield
        finally:
            for part in self._forwards:
                del vars(part)["forward"]

    def drop(self) -> None:
        """Frees the copy: the weights have changed, or will."""
        self._forwards = None

    def release(self) -> None:
        """Frees the copy if it was used enough for making another to cost little."""
        if self._tokens >= _AMORTISED:
            self.drop()


def _worthwhile(model: nn.Module) -> list[nn.Linear]:
    """Returns the linear layers that gain: large, dense, float32, on the CPU, and with no `forward` of their own."""
    if not torch.backends.mkldnn.is_available():
        return []
    parts = [part for part in model.modules() if type(part) is nn.Linear and "forward" not in vars(part)]
    weights = [(part, part.weight) for part in parts if type(part.weight) is nn.Parameter]
    return [
        part
        for part, weight in weights
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= WORTH_REORDERING
    ]


def _reordered(part: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(part.weight.detach(), _HINT)
    return partial(_product, part, weight)


def _product(part: nn.Linear, reordered: Tensor, x: Tensor) -> Tensor:
    if not torch.is_inference_mode_enabled() or x.dtype != torch.float32:
        return F.linear(x, part.weight, part.bias)
    if (tokens := x.numel() // part.in_features) <= _FEW:
        rows = x.reshape(tokens, part.in_features)
        # MKL reads the weight at two thirds of the speed for one column, and at a fifth for columns that are not contiguous.
        columns = (rows.expand(2, -1) if tokens == 1 else rows).contiguous().t()
        product = (part.weight @ columns)[:, :tokens].t().reshape(*x.shape[:-1], part.out_features).contiguous()
        return product if part.bias is None else product.add_(part.bias)
    return torch.ops.mkldnn._linear_pointwise(x, reordered, part.bias, "none", [], "")
