"""Optimizers, learning-rate schedules and gradient clipping.

`muon` uses Muon for the matrices of the transformer blocks, and AdamW for everything else (embeddings, norms, heads), as its
authors recommend. `OptimizerSet` hides this difference, and the model's precision: it updates float32 weights (see
`precision.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from etude.errors import CheckpointError, ConfigError
from etude.metrics import Mean, Metrics
from etude.options import OptimOptions
from etude.training.extra_optimizers import adamw_8bit, schedule_free_adamw
from etude.training.muon import Muon
from etude.training.precision import DynamicLossScale, MasterWeights
from etude.training.sharding import clip_sharded, is_sharded, share_of, sum_gradients

_SCALE = "loss_scale."
_SAMPLED = 2**15  # weights of each tensor from which `weight_change` is estimated


class OptimizerSet:
    """One or two optimizers over a model, and their learning-rate schedule.

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
        dtype: torch.dtype | None = None,
    ) -> None:
        """The gradients of the `world_size` ranks are summed before each step, so that all ranks take the same step; those
        of a sharded model are already sums.

        Args:
            total_steps: end of the schedule; required by a decaying one.
            first_step: training step at which the schedule starts.
            exact: the float32 weights of a model with rounded ones (see `etude.training.precision.round_weights`).
            dtype: what the model computes in; None: the dtype of its weights.

        Raises:
            ConfigError: `total_steps` is missing, or no parameter is trainable.
        """
        if options.lr_scheduler_type != "constant" and not total_steps:
            raise ConfigError("optim.lr_scheduler_type needs trainer.total_training_steps or total_epochs")
        self.options, self.total_steps, self.first_step = options, total_steps or 0, first_step
        self.training_step = first_step
        self.weight_change = 0.0  # ‖Δw‖ / ‖w‖ of the last step; 0 if it was skipped
        self.rank, self.world_size, self._sharded = rank, world_size, is_sharded(model)
        self._model_parameters = [p for p in model.parameters() if p.requires_grad]
        self._masters = MasterWeights(model, exact, options.offload and not self._sharded)
        self._loss_scale = DynamicLossScale.for_model(model, dtype)
        self._parameters = [self._masters.of(p) for p in self._model_parameters]
        self._names: dict[Tensor, str] = {
            self._masters.of(p): name for name, p in model.named_parameters() if p.requires_grad
        }
        self._by_name = {name: parameter for parameter, name in self._names.items()}
        self._optimizers = _build(model, options, self._masters)

    @property
    def lr(self) -> float:
        """Learning rate of the current training step (AdamW's, if there are two optimizers)."""
        return self.options.lr * self._factor()

    def set_adam(
        self, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, clip_grad: float | None
    ) -> None:
        """Sets what the next steps of AdamW use; the moments stay. `clip_grad`: None does not clip.

        Raises:
            ValueError: an option is outside its range.
        """
        self.options = replace(self.options, lr=lr, betas=betas, weight_decay=weight_decay, clip_grad=clip_grad)
        self._optimizers = [(optimizer, lr) for optimizer, _ in self._optimizers]
        for optimizer, _ in self._optimizers:
            for group in optimizer.param_groups:
                group.update(betas=betas, eps=eps, weight_decay=weight_decay)

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

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context of an update. Clears gradients left by an update that failed half-way. Inside, a schedule-free optimizer
        switches to the weights at which gradients are taken; outside, to the averaged ones."""
        self.zero_grad()
        self._move("train")
        try:
            yield
        finally:
            self._move("eval")

    def _move(self, where: str) -> None:
        moves = [getattr(optimizer, where) for optimizer, _ in self._optimizers if hasattr(optimizer, where)]
        for move in moves:
            move()
        if moves:
            self._masters.publish()

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradients of a part of the loss for the next `step`."""
        (loss if self._loss_scale is None else loss * self._loss_scale.value).backward()

    def step(self) -> float:
        """Sums the gradients over ranks, clips, steps and clears gradients; returns the norm before clipping. If gradients
        are non-finite, all ranks skip the step. Sets `weight_change`."""
        if self._loss_scale is not None:
            self._loss_scale.unscale(self._parameters)
        limit = self.options.clip_grad or math.inf
        if self._sharded:
            norm = clip_sharded(self._parameters, limit)
        else:
            if self.world_size > 1:
                sum_gradients(self._parameters)
            norm = float(nn.utils.clip_grad_norm_(self._parameters, limit))
        self.weight_change = 0.0
        if math.isfinite(norm):
            before, factor = self._sample(), self._factor()
            for optimizer, base in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = base * factor
                optimizer.step()
            self._masters.publish()
            self.weight_change = self._change_since(before)
        if self._loss_scale is not None:
            self._loss_scale.note(math.isfinite(norm))
        self.zero_grad()
        return norm

    def _sample(self) -> list[Tensor]:
        """Copies every k-th trainable weight of each tensor, on this rank."""
        local = [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in self._parameters]
        return [weight.flatten()[:: _stride(p)].clone() for p, weight in zip(self._parameters, local)]

    def _change_since(self, before: list[Tensor]) -> float:
        first = self._parameters[0]  # weights may be on the CPU while ranks talk over their devices
        device = first.device_mesh.device_type if isinstance(first, DTensor) else first.device
        squares = torch.zeros(2, dtype=torch.float64, device=device)  # of the change, and of the weights
        for parameter, old, new in zip(self._parameters, before, self._sample()):
            share = _stride(parameter) * (share_of(parameter) if isinstance(parameter, DTensor) else 1.0)
            norms = torch.stack([torch.linalg.vector_norm(new - old), torch.linalg.vector_norm(new)])
            squares += share * norms.to(squares.device).double() ** 2
        if self._sharded:
            dist.all_reduce(squares)
        change, size = squares.tolist()
        return math.sqrt(change / size) if size else 0.0

    def zero_grad(self) -> None:
        """Clears all gradients."""
        for parameter in (*self._model_parameters, *self._parameters):
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that a bit-exact continuation needs: float32 weights (`model.NAME`), moments
        (`optimizer.KIND.NAME.FIELD`) and the loss scale. The tensors are not copies."""
        state = {f"model.{name}": parameter.detach() for parameter, name in self._names.items()}
        for optimizer, _ in self._optimizers:
            for parameter, fields in optimizer.state.items():
                prefix = f"{_kind(optimizer)}{self._names[parameter]}"
                state |= {f"{prefix}.{field}": torch.as_tensor(value) for field, value in fields.items()}
        scale = {} if self._loss_scale is None else self._loss_scale.state()
        return state | {f"{_SCALE}{name}": value for name, value in scale.items()}

    def empty(self, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocates a CPU tensor for the entry `key` of a saved `state_dict`, sharded like its weight."""
        name = key.removeprefix("model.")
        if key.startswith("optimizer."):  # .KIND.NAME.FIELD
            name = key.split(".", 2)[2].rpartition(".")[0]
        owner = self._by_name.get(name)
        if not isinstance(owner, DTensor) or owner.shape != shape:
            return torch.empty(shape, dtype=dtype)
        return torch.empty_like(owner, dtype=dtype, device="cpu", requires_grad=False)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores float32 weights (in place), moments and the loss scale. Weight decay, betas and learning rates stay as
        configured, and so does the model's precision.

        Raises:
            CheckpointError: saved by another kind of optimizer or for another model; nothing was changed.
        """
        weights = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
        shapes = {name: tuple(value.shape) for name, value in weights.items()}
        if shapes != {name: tuple(parameter.shape) for parameter, name in self._names.items()}:
            raise CheckpointError(
                f"{len(weights)} weights saved, {len(self._names)} in use: they are not of this model"
            )
        known = {f"{_kind(optimizer)}{name}" for optimizer, _ in self._optimizers for name in self._owned(optimizer)}
        moments = (key for key in state if key.startswith("optimizer."))
        if strange := next((key for key in moments if key.rpartition(".")[0] not in known), None):
            raise CheckpointError(f"the saved optimizer does not fit optim.name={self.options.name}: it has {strange}")
        for parameter, name in self._names.items():
            parameter.copy_(weights[name])
        self._masters.publish()
        for optimizer, _ in self._optimizers:
            self._load_moments(optimizer, state)
        if self._loss_scale is not None and f"{_SCALE}value" in state:
            self._loss_scale.load({k.removeprefix(_SCALE): v for k, v in state.items() if k.startswith(_SCALE)})

    def _load_moments(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
        """Loads the saved moments; a weight without any was never updated."""
        moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in state.items():
            if key.startswith(kind := _kind(optimizer)):
                name, _, field = key.removeprefix(kind).rpartition(".")
                moments[name][field] = value
        numbered = {number: moments[name] for number, name in enumerate(self._owned(optimizer)) if name in moments}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": numbered})

    def _owned(self, optimizer: torch.optim.Optimizer) -> list[str]:
        return [self._names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _stride(parameter: Tensor) -> int:
    return max(1, parameter.numel() // _SAMPLED) | 1  # odd: not a column of a matrix


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"optimizer.{type(optimizer).__name__}."


def _build(model: nn.Module, o: OptimOptions, masters: MasterWeights) -> list[tuple[torch.optim.Optimizer, float]]:
    """Builds the optimizers that have parameters, each with its peak learning rate."""
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
        built.append((_adamw(others, o), o.lr))
    return built


def _adamw(parameters: list[nn.Parameter], o: OptimOptions) -> torch.optim.Optimizer:
    kind: Any = {"adamw_schedule_free": schedule_free_adamw, "adamw_8bit": adamw_8bit}.get(o.name)
    settings: dict[str, Any] = {"lr": o.lr, "betas": o.betas, "weight_decay": o.weight_decay}
    return kind()(parameters, **settings) if kind else torch.optim.AdamW(parameters, **settings, fused=True)


def step_metrics(optimizer: OptimizerSet) -> Metrics:
    """Takes the optimizer step and returns `grad_norm`, `lr`, `weight_change` (of steps not skipped), and the counts
    `optimizer_steps` and `skipped_steps` (because of non-finite gradients). These are equal on all ranks; only the first one
    reports them."""
    lr, norm = optimizer.lr, optimizer.step()
    skipped = float(not math.isfinite(norm))
    if optimizer.rank:
        return {}
    return {
        "grad_norm": Mean(norm, 1),
        "lr": Mean(lr, 1),
        "weight_change": Mean(optimizer.weight_change, 1 - skipped),
        "optimizer_steps": 1.0,
        "skipped_steps": skipped,
    }
