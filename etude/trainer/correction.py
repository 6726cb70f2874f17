"""Correction of the mismatch between the engine that sampled and the model that trains (importance weights, rejection), and
an alarm for it.

Invariant: the correction compares log-probs of the same policy, before any update, over whole rollouts of the whole batch;
advantages and baselines are computed from all sampled rollouts, before any is rejected. With `bypass_mode` there are no
log-probs to compare yet: the actor's loss corrects, at every update (see `etude.workers.actor`).
"""

from __future__ import annotations

import torch

from etude.algorithms import importance_weights, rejection_mask
from etude.events import EventSink, Notice
from etude.metrics import Metrics as MetricParts
from etude.metrics import finish_metrics
from etude.options import RolloutCorrectionOptions
from etude.protocol import DataProto
from etude.trainer.metrics import Metrics
from etude.trainer.sequences import rollout_numbers

_CAUSES = (
    "likely causes: the engine samples with older weights, in another precision (rollout.dtype, the server's own), from a "
    "restricted or reshaped distribution (temperature, top_p, top_k, penalties of the server), or after another context "
    "(chat template, special tokens); docs/algorithms.md says how to tell them apart"
)


def correct_mismatch(
    batch: DataProto, correction: RolloutCorrectionOptions, episodes: bool
) -> tuple[DataProto, Metrics]:
    """Adds the column `rollout_is_weights` (rows, response_len) and applies rejection: masks rejected tokens in
    `response_mask` and removes rollouts that have none left. Also returns the metrics `rollout_corr/rollout_*`. Needs
    `old_log_probs` and `rollout_log_probs`.

    A sequence is a whole rollout; with `episodes`, each row is a separate one.
    """
    if not correction.corrects or correction.bypass_mode or not len(batch):
        return batch, {}
    columns, metrics, numbers = batch.batch, MetricParts(), rollout_numbers(batch)
    mask, ratio = columns["response_mask"], columns["old_log_probs"].double() - columns["rollout_log_probs"].double()
    rollout = None if episodes else numbers
    if correction.rollout_is is not None:
        columns["rollout_is_weights"], metrics = importance_weights(
            ratio,
            mask,
            level=correction.rollout_is,
            bounds=correction.is_bounds,
            batch_normalize=correction.rollout_is_batch_normalize,
            rollout=rollout,
        )
    if correction.rollout_rs:
        columns["response_mask"], rejected = rejection_mask(ratio, mask, correction.criteria, rollout)
        metrics |= rejected
        batch = batch.select_idxs(torch.isin(numbers, numbers[columns["response_mask"].any(dim=1)]))
    return batch, finish_metrics(metrics)


class MismatchAlarm:
    """Warns once that the engine's log-probs are far from the trainer's, and again whenever the distance grows tenfold."""

    def __init__(self, threshold: float | None) -> None:
        self._threshold = threshold

    def note(self, metrics: Metrics, emit: EventSink) -> None:
        """Checks the metrics of a training step."""
        distance = metrics.get("rollout_corr/k3_kl", 0.0)
        if self._threshold is None or not distance > self._threshold:  # also returns for NaN
            return
        self._threshold = 10 * distance
        emit(
            Notice(
                f"step {metrics['training/global_step']:.0f}: the engine's log-probs are far from the trainer's "
                f"(rollout_corr/k3_kl={distance:.3g} nats a token, p99 of |Δ log p| "
                f"{metrics['rollout_corr/log_prob_diff_p99']:.2g}); {_CAUSES}"
            )
        )
