"""Optimizers from optional packages: schedule-free AdamW, and AdamW with 8-bit moments.

Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682) takes gradients at one point but is evaluated at another, a
running average: `train` and `eval` switch the parameters between the two. `OptimizerSet.training` does this, so outside of
an update everything (sampling, scoring, saving, weight sync) uses the average.
"""

from __future__ import annotations

from typing import Any

import torch

from etude.errors import MissingExtraError

_COUNTERS = ("k", "weight_sum", "lr_max")


def schedule_free_adamw() -> type[torch.optim.Optimizer]:
    """Raises MissingExtraError if `schedulefree` is not installed."""
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError as error:
        raise MissingExtraError("optim.name=adamw_schedule_free", "schedulefree") from error

    class ScheduleFreeAdamW(AdamWScheduleFree):
        """Stores its counters with each parameter's moments, so that checkpoints include them."""

        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for group in self.param_groups:
                for fields in (self.state[p] for p in group["params"] if self.state[p]):
                    fields |= {name: torch.tensor(group[name], dtype=torch.float64) for name in _COUNTERS}
            return loss

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            for fields in list(state["state"].values())[:1]:  # one group, so all counters are equal
                counters = {name: float(fields[name]) for name in _COUNTERS}
                self.param_groups[0].update(counters, k=int(counters["k"]))

    return ScheduleFreeAdamW


def adamw_8bit() -> type[torch.optim.Optimizer]:
    """Raises MissingExtraError if `bitsandbytes` is not installed."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise MissingExtraError("optim.name=adamw_8bit", "bitsandbytes") from error

    class ByteAdamW(AdamW8bit):
        """Restores step counts from a checkpoint as ints, which its kernels require."""

        def load_state_dict(self, state: dict[str, Any], move_to_device: bool = True) -> None:
            super().load_state_dict(state, move_to_device)
            for fields in self.state.values():
                fields["step"] = int(fields["step"])

    return ByteAdamW
