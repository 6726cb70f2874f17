"""Correction of the mismatch between the engine that sampled and the model that trains (importance weights, rejection), and
an alarm for it.

Invariant: the correction compares log-probs of the same policy, before any update, over whole rollouts of the whole batch;
advantages and baselines are computed from all sampled rollouts, before any is rejected. With `bypass_mode` there are no
log-probs to compare yet: the actor's loss corrects, at every update (see `etude.workers.actor`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.algorithms import importance_weights, rejection_mask
from etude.distributed import reads
from etude.metrics import Metrics as MetricParts
from etude.metrics import finish_metrics
from etude.options import RolloutCorrectionOptions
from etude.protocol import DataProto
from etude.trainer.events import EventSink, Notice
from etude.trainer.metrics import Metrics
from etude.trainer.rollouts import MAIN_SEQUENCE, rollout_numbers

_CAUSES = (
    "likely causes: the engine samples with older weights, in another precision (rollout.dtype, the server's own), from a "
    "restricted or reshaped distribution (temperature, top_p, top_k, penalties of the server), or after another context "
    "(chat template, special tokens); docs/algorithms.md says how to tell them apart"
)


@reads("response_mask", "old_log_probs", "rollout_log_probs", MAIN_SEQUENCE)
def correct_mismatch(
    batch: DataProto, correction: RolloutCorrectionOptions, episodes: bool
) -> tuple[DataProto, list[int], Metrics]:
    """Weighs and rejects what the engine sampled. A sequence is a whole rollout; with `episodes`, a row.

    Returns:
        The columns `rollout_is_weights` and `response_mask` without rejected tokens (rows, response_len), each if it is
        configured; the rows of rollouts with a token left; and the metrics `rollout_corr/rollout_*`.
    """
    columns, metrics, numbers = batch.batch, MetricParts(), rollout_numbers(batch)
    mask, ratio = columns["response_mask"], columns["old_log_probs"].double() - columns["rollout_log_probs"].double()
    found, rows, rollout = dict[str, Tensor](), [*range(len(batch))], None if episodes else numbers
    if correction.rollout_is is not None:
        found["rollout_is_weights"], metrics = importance_weights(
            ratio,
            mask,
            level=correction.rollout_is,
            bounds=correction.is_bounds,
            batch_normalize=correction.rollout_is_batch_normalize,
            rollout=rollout,
        )
    if correction.rollout_rs:
        found["response_mask"], rejected = rejection_mask(ratio, mask, correction.criteria, rollout)
        metrics |= rejected
        left = torch.isin(numbers, numbers[found["response_mask"].any(dim=1)])
        rows = left.nonzero().flatten().tolist()
    return DataProto.from_single_dict(found), rows, finish_metrics(metrics)


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
        age = metrics.get("staleness/mean", 0.0)
        stale = (
            f"the tokens are {age:.2g} steps old on average (trainer.max_staleness), which may be all; else "
            if age
            else ""
        )
        emit(
            Notice(
                f"step {metrics['training/global_step']:.0f}: the engine's log-probs are far from the trainer's "
                f"(rollout_corr/k3_kl={distance:.3g} nats a token, p99 of |Δ log p| "
                f"{metrics['rollout_corr/log_prob_diff_p99']:.2g}); {stale}{_CAUSES}"
            )
        )
