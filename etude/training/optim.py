"""Optimizers, learning-rate schedules and gradient clipping.

`muon` uses Muon for the matrices of the transformer blocks, and AdamW for everything else (embeddings, norms, heads), as its
authors advise. `OptimizerSet` hides the difference, and the model's precision: it updates float32 weights (see
`precision.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from etude.errors import CheckpointError, ConfigError, one_line
from etude.options import OptimOptions
from etude.training.muon import Muon
from etude.training.precision import DynamicLossScale, MasterWeights
from etude.training.ranks import sum_gradients


class OptimizerSet:
    """One or two optimizers over a model, and their schedule.

    The caller sets `training_step`, the current training step from 0: the schedule counts these, not optimizer steps.
    """

    def __init__(
        self,
        model: nn.Module,
        options: OptimOptions,
        total_steps: int | None,
        *,
        first_step: int = 0,
        exact: Mapping[nn.Parameter, Tensor] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """The schedule runs from training step `first_step` to `total_steps`, which a decaying one needs.
        `exact`: the weights in float32 where the model's are rounded (see `etude.training.precision.round_weights`). The
        gradients of `world_size` ranks are summed before each step, so that all take the same."""
        if options.lr_scheduler_type != "constant" and not total_steps:
            raise ConfigError("optim.lr_scheduler_type needs trainer.total_training_steps or total_epochs")
        self.options, self.total_steps, self.first_step = options, total_steps or 0, first_step
        self.training_step = first_step
        self.rank, self._world_size = rank, world_size
        self._model_parameters = [p for p in model.parameters() if p.requires_grad]
        self._masters, self._loss_scale = MasterWeights(model, exact), DynamicLossScale.for_model(model)
        self._parameters = [self._masters.of(p) for p in self._model_parameters]
        self._optimizers = _build(model, options, self._masters)

    @property
    def lr(self) -> float:
        """Learning rate of the training step (AdamW's, where there are two)."""
        return self.options.lr * self._factor()

    def _factor(self) -> float:
        o, step, steps = self.options, self.training_step - self.first_step, self.total_steps - self.first_step
        if step < o.lr_warmup_steps:
            return (step + 1) / o.lr_warmup_steps
        if o.lr_scheduler_type == "constant":
            return 1.0
        start = max(o.lr_warmup_steps, steps - round(steps * o.lr_decay_ratio))
        progress = min(1.0, max(0.0, (step - start) / max(steps - start, 1)))
        shape = 1 - progress if o.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return o.min_lr_ratio + (1 - o.min_lr_ratio) * shape

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradients of a part of the loss for the next `step`."""
        (loss if self._loss_scale is None else loss * self._loss_scale.value).backward()

    def step(self) -> float:
        """Sums the ranks' gradients, clips, steps, clears gradients; returns the norm before clipping. Non-finite gradients
        skip the step, on all ranks alike."""
        if self._loss_scale is not None:
            self._loss_scale.unscale(self._parameters)
        if self._world_size > 1:
            sum_gradients(self._parameters)
        limit = self.options.clip_grad or math.inf
        norm = float(nn.utils.clip_grad_norm_(self._parameters, limit))
        if math.isfinite(norm):
            factor = self._factor()
            for optimizer, base in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = base * factor
                optimizer.step()
            self._masters.publish()
        if self._loss_scale is not None:
            self._loss_scale.note(math.isfinite(norm))
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for parameter in (*self._model_parameters, *self._parameters):
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact continuation needs."""
        scale = None if self._loss_scale is None else self._loss_scale.state()
        optimizers = [o.state_dict() for o, _ in self._optimizers]
        return {"optimizers": optimizers, "weights": self._masters.state(), "loss_scale": scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores moments, float32 weights and the loss scale; decay, betas and rates stay those that the options ask for.

        Raises:
            CheckpointError: it was saved by another kind of optimizer, or for another model or precision.
        """
        held, saved = [o for o, _ in self._optimizers], state["optimizers"]
        try:
            if len(held) != len(saved):
                raise ValueError(f"{len(saved)} optimizers saved, {len(held)} in use")
            for optimizer, part in zip(held, saved):
                asked = [{**group, "params": None} for group in optimizer.param_groups]
                optimizer.load_state_dict(part)
                for group, options in zip(optimizer.param_groups, asked):
                    group.update({**options, "params": group["params"]})
            self._masters.restore(state.get("weights", ()))
        except ValueError as error:
            raise CheckpointError(
                f"the saved optimizer does not fit optim.name={self.options.name} and this model: {one_line(error)}"
            ) from error
        if self._loss_scale is not None:
            self._loss_scale.load(state["loss_scale"])


def _build(model: nn.Module, o: OptimOptions, masters: MasterWeights) -> list[tuple[torch.optim.Optimizer, float]]:
    """The optimizers that have parameters, each with its peak learning rate."""
    named = [(n, masters.of(p)) for n, p in model.named_parameters() if p.requires_grad]
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
