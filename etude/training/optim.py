"""Optimizers, learning-rate schedules and gradient clipping.

`muon` uses Muon for the matrices of the transformer blocks, and AdamW for everything else (embeddings,
norms, heads), as its authors advise. One `OptimizerSet` hides the difference.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from etude.errors import CheckpointError, ConfigError, one_line
from etude.options import OptimOptions
from etude.training.muon import Muon


class OptimizerSet:
    """One or two optimizers over a model, their schedule and the number of steps done."""

    def __init__(self, model: nn.Module, options: OptimOptions, total_steps: int | None) -> None:
        """`total_steps` is the length of the schedule; a decaying one needs it."""
        if options.lr_scheduler_type != "constant" and not total_steps:
            raise ConfigError("optim.lr_scheduler_type needs trainer.total_training_steps or total_epochs")
        self.options, self.total_steps, self.steps = options, total_steps or 0, 0
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizers = _build(model, options)

    @property
    def lr(self) -> float:
        """Learning rate of the next step (AdamW's, where there are two)."""
        return self.options.lr * self._factor()

    def _factor(self) -> float:
        o, step = self.options, self.steps
        warm = min(1.0, (step + 1) / o.lr_warmup_steps) if o.lr_warmup_steps else 1.0
        if o.lr_scheduler_type == "constant":
            return warm
        decay_steps = max(1, round(self.total_steps * o.lr_decay_ratio))
        progress = min(1.0, max(0.0, (step - (self.total_steps - decay_steps)) / decay_steps))
        shape = 1 - progress if o.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return warm * (o.min_lr_ratio + (1 - o.min_lr_ratio) * shape)

    def step(self) -> float:
        """Clips, steps, clears gradients; returns the gradient norm before clipping. Not-finite gradients skip the step."""
        limit = self.options.clip_grad or math.inf
        norm = float(nn.utils.clip_grad_norm_(self._parameters, limit))
        if math.isfinite(norm):
            factor = self._factor()
            for optimizer, base in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = base * factor
                optimizer.step()
        self.steps += 1
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact continuation needs."""
        return {"steps": self.steps, "optimizers": [o.state_dict() for o, _ in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`'s result.

        Raises:
            CheckpointError: it was saved by another kind of optimizer or for another model.
        """
        held, saved = [o for o, _ in self._optimizers], state["optimizers"]
        try:
            if len(held) != len(saved):
                raise ValueError(f"{len(saved)} optimizers saved, {len(held)} in use")
            for optimizer, part in zip(held, saved):
                optimizer.load_state_dict(part)
        except ValueError as error:
            raise CheckpointError(
                f"the saved optimizer does not fit optim.name={self.options.name} and this model: {one_line(error)}"
            ) from error
        self.steps = state["steps"]


def _build(model: nn.Module, o: OptimOptions) -> list[tuple[torch.optim.Optimizer, float]]:
    """The optimizers that have something to optimise, each with its peak learning rate."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ConfigError("the model has no trainable parameters: nothing to optimise")
    built: list[tuple[torch.optim.Optimizer, float]] = []
    matrices = [p for n, p in named if o.name == "muon" and p.ndim == 2 and ".layers." in n]
    if matrices:
        peak = o.lr * o.muon_lr_multiplier
        built.append((Muon(matrices, lr=peak, weight_decay=o.weight_decay, momentum=0.95), peak))
    taken = {id(p) for p in matrices}
    others = [p for _, p in named if id(p) not in taken]
    if others:
        adamw = torch.optim.AdamW(others, lr=o.lr, betas=o.betas, weight_decay=o.weight_decay, fused=True)
        built.append((adamw, o.lr))
    return built
