"""`LaggingWeights`: a model's earlier or averaged weights, as those of its own teacher (self-distillation).

Invariant: outside `applied` the model has its own weights, bit for bit; the lagging ones are float32 whatever the model's
dtype, since small steps towards it would round to none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class LaggingWeights:
    """Of the trainable parameters of `model`, sharded as they are; at first equal to them."""

    def __init__(self, model: Any) -> None:
        self._live = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._weights = {name: each.detach().float().clone() for name, each in self._live.items()}

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Moves the weights towards the model's: T ← (1 − rate) T + rate θ, an exponential moving average."""
        for name, weights in self._weights.items():
            weights.lerp_(self._live[name].detach().float(), rate)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Computes with these weights inside."""
        own = {name: each.detach().clone() for name, each in self._live.items()}
        self._set(self._weights)
        try:
            yield
        finally:
            self._set(own)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the weights by parameter name."""
        return dict(self._weights)

    def empty(self, name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns a tensor like a weight, for `etude.workers.checkpoint.read_state` to read into."""
        return torch.empty_like(self._weights[name])

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes the weights of a `state_dict`."""
        for name, weights in self._weights.items():
            weights.copy_(state[name])

    @torch.no_grad()
    def _set(self, weights: Mapping[str, Tensor]) -> None:
        for name, each in self._live.items():
            each.copy_(weights[name])
