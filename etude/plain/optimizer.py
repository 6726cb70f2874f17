"""The plain trainer's optimizers and learning-rate schedule, one tensor at a time.

AdamW  arXiv 1711.05101, algorithm 2    schedule-free AdamW  arXiv 2405.15682, algorithm 1    Muon  Jordan et al. 2024
"""

from __future__ import annotations

import math

import torch


def newton_schulz(matrix):
    """Towards U Vᵀ of matrix = U S Vᵀ: five steps of Muon's quintic iteration."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / max(float(x.norm()), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Optimizer:
    """AdamW, with or without a schedule, or Muon for the matrices of the blocks and AdamW for the rest; gradients clipped by
    their global norm."""

    def __init__(self, model, options):
        self.options, self.updates = options, 0
        self.parameters = dict(model.named_parameters())
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.is_free = options["name"] == "adamw_schedule_free"
        self.averages, self.steps_z, self.squares = {}, {n: p.detach().clone() for n, p in self.parameters.items()}, 0.0

    @torch.no_grad()
    def begin(self):
        """Before the gradients of an update: schedule-free takes them at y = (1 − β₁) z + β₁ x, and is used at x."""
        if self.is_free:
            self.averages = {name: p.detach().clone() for name, p in self.parameters.items()}
            for name, p in self.parameters.items():
                p.copy_((1 - self.options["betas"][0]) * self.steps_z[name] + self.options["betas"][0] * p)

    @torch.no_grad()
    def step(self, lr):
        """One update at the rate `lr`; returns its figures: the norm of the gradient before clipping, ‖Δw‖ / ‖w‖ of every
        k-th weight (about 2¹⁵ of each tensor), and `lr`."""
        self.updates += 1
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in self.parameters.values()))
        limit = self.options["clip_grad"]
        scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        self.squares += lr**2
        for name, p in self.parameters.items():
            if self.is_free:
                self._schedule_free(name, p, p.grad * scale, lr)
            elif self.options["name"] == "muon" and p.ndim == 2 and ".layers." in name:
                self._muon(name, p, p.grad * scale, lr * self.options["muon_lr_multiplier"])
            else:
                self._adamw(name, p, p.grad * scale, lr)
            p.grad = None
        moved = size = 0.0
        for name, p in self.parameters.items():
            each = max(1, p.numel() // 2**15) | 1
            after = (
                (1 - self.options["betas"][0]) * self.steps_z[name] + self.options["betas"][0] * p
                if self.is_free
                else p
            )
            old, new = before[name].flatten()[::each], after.flatten()[::each]
            moved, size = moved + each * float(((new - old) ** 2).sum()), size + each * float((new**2).sum())
        return {"grad_norm": norm, "weight_change": math.sqrt(moved / size) if size else 0.0, "lr": lr}

    def _adamw(self, name, p, g, lr):
        (beta1, beta2), m, v = self.options["betas"], self.first[name], self.second[name]
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g**2)
        m_hat, v_hat = m / (1 - beta1**self.updates), v / (1 - beta2**self.updates)
        p.mul_(1 - lr * self.options["weight_decay"]).sub_(lr * m_hat / (v_hat.sqrt() + 1e-8))

    def _schedule_free(self, name, y, g, lr):
        beta2, v, z, x = self.options["betas"][1], self.second[name], self.steps_z[name], self.averages[name]
        v.copy_(beta2 * v + (1 - beta2) * g**2)
        v_hat = v / (1 - beta2**self.updates)
        z.sub_(lr * (g / (v_hat.sqrt() + 1e-8) + self.options["weight_decay"] * y))
        share = lr**2 / self.squares
        y.copy_((1 - share) * x + share * z)

    def _muon(self, name, p, g, lr):
        m = self.first[name]
        m.copy_(0.95 * m + 0.05 * g)
        nesterov = 0.05 * g + 0.95 * m
        update = max(1.0, p.shape[0] / p.shape[1]) ** 0.5 * newton_schulz(nesterov)
        p.mul_(1 - lr * self.options["weight_decay"]).sub_(lr * update)


def schedule(options, step, steps):
    """The learning rate of training step `step` = 0 … `steps` − 1: warm-up, then decay that would end after the last."""
    lr, warmup, floor = options["lr"], options["lr_warmup_steps"], options["min_lr_ratio"]
    if step < warmup:
        return lr * (step + 1) / warmup
    begin = max(warmup, steps - round(steps * options["lr_decay_ratio"]))
    progress = max(0.0, (step - begin) / (steps - begin)) if steps > begin else 0.0
    shape = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return lr * (floor + (1 - floor) * shape[options["lr_scheduler_type"]])
