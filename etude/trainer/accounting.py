"""The outcome of every prompt: `prompts.jsonl` in the run's folder, one line per step.

Invariant: every prompt of a step is on its line once, trained on or dropped for one cause. Over the lines of a completed
run, even if it was killed and resumed, no prompt of the plan is missing and none appears twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

from etude.protocol import DataProto
from etude.trainer.rollouts import rollouts_of

PROMPTS_FILE = "prompts.jsonl"
RolloutOutcome: TypeAlias = tuple[str, Any, str | None]
"""For one rollout: its prompt's `uid`, the row's own `index`, and why the rollout was dropped (None: it was not)."""


def list_rollouts(batch: DataProto) -> list[RolloutOutcome]:
    """Lists the rollouts of a batch."""
    columns = batch.non_tensor_batch
    indices = columns["index"].tolist() if "index" in columns else [None] * len(batch)
    causes = [None if rollout.dropped is None else rollout.dropped.value for rollout in rollouts_of(batch)]
    if (baselines := columns.get("reward_baselines")) is not None:  # None: the prompt's greedy rollout was dropped
        causes = [
            "no_baseline" if cause is None and baseline is None else cause
            for cause, baseline in zip(causes, baselines.tolist())
        ]
    return list(zip(columns["uid"].tolist(), indices, causes))


def account(
    rollouts: Iterable[RolloutOutcome], usable: Collection[str], trained: Collection[str], stale: Collection[str]
) -> dict[str, Any]:
    """Builds a step's line: `trained`, [uid, index] of each prompt with a rollout that was trained on; `dropped`, the other
    prompts by cause.

    Args:
        rollouts: all rollouts of the step.
        usable: uids of prompts with a rollout that can be trained on.
        trained: uids of prompts with a rollout that was trained on.
        stale: uids of prompts that are too old.
    """
    prompts: dict[str, tuple[Any, list[str | None]]] = {}
    for uid, index, reason in rollouts:
        prompts.setdefault(uid, (index, []))[1].append(reason)
    record: dict[str, Any] = {"trained": [[uid, index] for uid, (index, _) in prompts.items() if uid in trained]}
    dropped: dict[str, list[Any]] = {}
    for uid, (index, reasons) in prompts.items():
        if uid not in trained:
            broken = next((reason for reason in reasons if reason is not None), "nothing_sampled")
            cause = "too_stale" if uid in stale else "not_learned" if uid in usable else broken
            dropped.setdefault(cause, []).append([uid, index])
    return record | {"dropped": dropped}


def accounting_metrics(record: dict[str, Any]) -> dict[str, float]:
    """Number of prompts that a step took from the plan, trained on, and dropped, by cause."""
    trained = float(len(record["trained"]))
    dropped = {f"prompts/dropped/{cause}": float(len(prompts)) for cause, prompts in record["dropped"].items()}
    return {"prompts/planned": trained + sum(dropped.values()), "prompts/trained": trained, **dropped}
