"""Tinker's losses as sums of Étude's: L = Σ over scored tokens, so that gradients of several requests add up.

With target log-probs log π, `weights` w, `advantages` A, `logprobs` log π_old and r = π / π_old:
cross_entropy −w log π; importance_sampling −r A; ppo −min(r A, clip(r) A); cispo −sg(clip(r)) A log π; dro
−(A log π − β/2 (log r)²). `clip` is to [clip_low_threshold, clip_high_threshold], by default [0.8, 1.2]; β is 0.05.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from etude.algorithms import policy_loss
from etude.errors import DataError
from etude.registry import did_you_mean
from etude.tinker.wire import TrainingRequest

_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_UNBOUNDED = 1e9


def _clip_ratios(options: Mapping[str, float]) -> dict[str, Any]:
    return {
        "clip_ratio_low": 1 - options.get("clip_low_threshold", -_UNBOUNDED),
        "clip_ratio_high": options.get("clip_high_threshold", _UNBOUNDED) - 1,
    }


def _without_dual_clip(options: Mapping[str, float]) -> dict[str, Any]:
    return {**_clip_ratios(options), "clip_ratio_c": _UNBOUNDED}


@dataclass(frozen=True)
class TinkerLoss:
    """One of them: the tensors that each datum needs, its options with their defaults, and Étude's loss, whose options
    `convert` makes of Tinker's."""

    needs: tuple[str, ...] = ("logprobs", "advantages")
    options: Mapping[str, float] = field(default_factory=dict)
    policy_loss: str | None = None
    convert: Callable[[Mapping[str, float]], dict[str, Any]] = _without_dual_clip

    def scored(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """(N,) mask of the targets that have a part in the loss: not those whose inputs are all 0, such as a prompt's."""
        return torch.stack([inputs[name] != 0 for name in self.needs]).any(dim=0).any(dim=-1)

    def total(self, log_probs: Tensor, micro: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
        """The sum over scored tokens; `log_probs` (rows, width, K), the columns of `micro` likewise."""
        if self.policy_loss is None:
            return -(log_probs * micro["weights"].to(log_probs.dtype)).sum()
        return policy_loss(
            self.policy_loss,
            old_log_prob=micro["logprobs"][..., 0].to(log_probs.dtype),
            log_prob=log_probs[..., 0],
            advantages=micro["advantages"][..., 0],
            response_mask=self.scored(micro).long(),  # `forward` has log-probs of a prompt's tokens, too
            loss_agg_mode="token-sum",
            **self.convert({**self.options, **config}),
        )[0]


LOSSES = {
    "cross_entropy": TinkerLoss(needs=("weights",)),
    "importance_sampling": TinkerLoss(policy_loss="vanilla"),
    "ppo": TinkerLoss(options=_CLIP, policy_loss="vanilla"),
    "cispo": TinkerLoss(options=_CLIP, policy_loss="cispo", convert=_clip_ratios),
    "dro": TinkerLoss(options={"beta": 0.05}, policy_loss="dro", convert=lambda given: {"dro_beta": given["beta"]}),
}


def loss_of(request: TrainingRequest) -> TinkerLoss:
    """Returns the request's loss.

    Raises:
        DataError: it is not offered; an option is unknown; a datum lacks a tensor or has one that the loss does not use, or
            several targets a token, which only cross_entropy takes.
    """
    loss = LOSSES.get(request.loss)
    if loss is None:
        near = did_you_mean(request.loss, LOSSES)
        raise DataError(f"loss_fn '{request.loss}' is not offered here{near} (offered: {', '.join(LOSSES)})")
    if strange := next((name for name in request.config if name not in loss.options), None):
        raise DataError(f"loss_fn_config: {request.loss} has no option '{strange}'")
    for number, given in enumerate(request.inputs):
        if given.keys() != set(loss.needs):
            raise DataError(
                f"datum {number}: {request.loss} takes target_tokens, {', '.join(loss.needs)}, not {sorted(given)}"
            )
        if loss.policy_loss and request.targets[number].shape[1] > 1:
            raise DataError(f"datum {number}: {request.loss} takes one target a token")
    return loss
