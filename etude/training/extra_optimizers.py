"""Optimizers of packages that need not be installed: AdamW without a schedule, and AdamW with moments of 8 bits.

Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682) takes gradients at one point and is evaluated at another, the
average that it keeps: `train` and `eval` move the parameters from one to the other. `OptimizerSet.training` does so, and
whatever is sampled, scored, saved or synced outside of an update is the average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from etude.errors import MissingExtraError
from etude.options import OptimOptions

_COUNTERS = ("k", "weight_sum", "lr_max")


def schedule_free_adamw(parameters: Sequence[nn.Parameter], options: OptimOptions) -> torch.optim.Optimizer:
    """Raises MissingExtraError where `schedulefree` is not installed."""
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError as error:
        raise MissingExtraError(f"optim.name={options.name}", "schedulefree") from error

    class ScheduleFreeAdamW(AdamWScheduleFree):
        """Keeps its counters beside each parameter's moments, where checkpoints look."""

        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for group in self.param_groups:
                for fields in (self.state[p] for p in group["params"] if self.state[p]):
                    fields |= {name: torch.tensor(group[name], dtype=torch.float64) for name in _COUNTERS}
            return loss

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            for fields in list(state["state"].values())[:1]:  # there is one group, and they are all alike
                counters = {name: float(fields[name]) for name in _COUNTERS}
                self.param_groups[0].update(counters, k=int(counters["k"]))

    made: torch.optim.Optimizer = ScheduleFreeAdamW(
        parameters, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
    )
    return made


def adamw_8bit(parameters: Sequence[nn.Parameter], options: OptimOptions) -> torch.optim.Optimizer:
    """Raises MissingExtraError where `bitsandbytes` is not installed."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise MissingExtraError(f"optim.name={options.name}", "bitsandbytes") from error

    class ByteAdamW(AdamW8bit):
        """Takes its step number from a checkpoint as the number that its kernels want."""

        def load_state_dict(self, state: dict[str, Any], move_to_device: bool = True) -> None:
            super().load_state_dict(state, move_to_device)
            for fields in self.state.values():
                fields["step"] = int(fields["step"])

    made: torch.optim.Optimizer = ByteAdamW(
        parameters, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
    )
    return made
