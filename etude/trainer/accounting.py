"""What became of every prompt: `prompts.jsonl` in the run's folder, a line a step.

Invariant: every prompt of a step is on its line once, trained or dropped for one cause; over the lines of a run that went
through, killed and resumed or not, no prompt of the plan is missing and none is there twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

from etude.protocol import DataProto
from etude.trainer.rollouts import rollouts_of

PROMPTS_FILE = "prompts.jsonl"
RolledOut: TypeAlias = tuple[str, Any, str | None]
"""Of a rollout the `uid` of its prompt, the row's own `index`, and why it was dropped, if it was."""


def rolled_out(batch: DataProto) -> list[RolledOut]:
    """The rollouts of a batch."""
    columns = batch.non_tensor_batch
    indices = columns["index"].tolist() if "index" in columns else [None] * len(batch)
    causes = [None if rollout.dropped is None else rollout.dropped.value for rollout in rollouts_of(batch)]
    return list(zip(columns["uid"].tolist(), indices, causes))


def account(
    rolled: Iterable[RolledOut], usable: Collection[str], trained: Collection[str], stale: Collection[str] = ()
) -> dict[str, Any]:
    """`trained`: [uid, index] of the prompts that some rollout was learned from; `dropped`: the others, by cause.

    Args:
        rolled: all rollouts of the step.
        usable: uids of those that can be learned from.
        trained: uids of those that were.
        stale: uids that are too old.
    """
    prompts: dict[str, tuple[Any, list[str | None]]] = {}
    for uid, index, reason in rolled:
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
    """How many prompts a step took from the plan and trained on, and how many it dropped, by cause."""
    counts = {cause: float(len(prompts)) for cause, prompts in record["dropped"].items()}
    found = {
        "prompts/planned": len(record["trained"]) + sum(counts.values()),
        "prompts/trained": len(record["trained"]),
    }
    return {**{name: float(n) for name, n in found.items()}, **{f"prompts/dropped/{c}": n for c, n in counts.items()}}
