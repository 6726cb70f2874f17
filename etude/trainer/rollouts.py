"""What the trainer makes of a rollout: the batch to roll out, who survived, rewards on tokens, dumps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.agents import RolloutResult, token_level_scores
from etude.agents.batch import rows_of
from etude.chat import ChatTemplate
from etude.data import collate
from etude.errors import TrainingStopped
from etude.protocol import DataProto
from etude.trainer.dumps import rollout_record, write_rollouts
from etude.trajectory import StopReason, Trajectory
from etude.workers.options import RewardOptions

_PROMPT_TENSORS = ["input_ids", "attention_mask", "position_ids"]  # of the prompt alone; the rollout makes the whole


def rollout_batch(rows: Sequence[dict[str, Any]], *, n: int, label: str, seed: int, validate: bool) -> DataProto:
    """Rows to roll out: each repeated `n` times side by side, with `uid` (one a prompt) and `rollout_index`."""
    batch = collate(rows)
    batch.pop(batch_keys=_PROMPT_TENSORS)
    batch.non_tensor_batch["uid"] = _objects([f"{label}-{i}" for i in range(len(rows))])
    batch = batch.repeat(n, interleave=True)
    batch.non_tensor_batch["rollout_index"] = _objects(range(len(batch)))
    batch.meta_info = {"seed": seed, "validate": validate}
    return batch


def results_of(batch: DataProto) -> list[RolloutResult]:
    """The rollout results, one a row."""
    return batch.non_tensor_batch["rollout"].tolist()


def trajectories_of(batch: DataProto) -> list[Trajectory]:
    """The trajectories of rows that have one."""
    return [result.trajectory for result in results_of(batch) if result.trajectory is not None]


def failure_metrics(batch: DataProto) -> dict[str, float]:
    """Counts of what did not work out: runs that infrastructure broke, rows dropped for that or for a long prompt."""
    results = results_of(batch)
    return {
        "rollout/infrastructure_failures": float(sum(r.failures for r in results)),
        "rollout/dropped": float(sum(r.dropped is StopReason.INFRASTRUCTURE for r in results)),
        "rollout/prompt_too_long": float(sum(r.dropped is StopReason.PROMPT_TOO_LONG for r in results)),
    }


def survivors(batch: DataProto, min_fraction: float) -> DataProto:
    """The rows that can be trained on: not dropped, and with at least one sampled token.

    Raises:
        TrainingStopped: too large a share fell to infrastructure.
    """
    results = results_of(batch)
    dropped = sum(result.dropped is StopReason.INFRASTRUCTURE for result in results)
    if 1 - dropped / len(results) < min_fraction:
        raise TrainingStopped(
            f"{dropped} of {len(results)} trajectories were lost to infrastructure failures, more than "
            f"trainer.min_valid_fraction={min_fraction} allows; the log above names the first"
        )
    has_trajectory = torch.tensor([result.trajectory is not None for result in results])
    return batch.select_idxs(has_trajectory & batch.batch["response_mask"].any(dim=1))


def place_scores(batch: DataProto, options: RewardOptions) -> None:
    """Adds the column `token_level_scores` (batch, response_len)."""
    width = batch.batch["response_mask"].shape[1]
    batch.batch["token_level_scores"] = token_level_scores(
        results_of(batch), width, options.tool_reward_weight, options.score_weight
    )


def spread_groups(batch: DataProto) -> list[int]:
    """Rows of groups whose total scores differ: the only ones that a group-relative estimator learns from."""
    totals = batch.batch["token_level_scores"].sum(dim=1).tolist()
    groups: dict[Any, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"].tolist()):
        groups.setdefault(uid, []).append(row)
    return [
        row
        for rows in groups.values()
        if max(totals[r] for r in rows) - min(totals[r] for r in rows) > 1e-8
        for row in rows
    ]


def dump(folder: str | Path, step: int, batch: DataProto, chat: ChatTemplate, options: RewardOptions) -> None:
    """Writes every trajectory of the batch to `{folder}/{step}.jsonl`."""
    records = []
    decode = chat.tokenizer.decode
    for row, result in zip(rows_of(batch), results_of(batch)):
        trajectory = result.trajectory
        if trajectory is None:
            continue
        row.pop("rollout")
        records.append(
            rollout_record(
                trajectory,
                row | {"attempt": result.attempts - 1},
                step=step,
                input=decode(trajectory.prompt_ids),
                output=decode(trajectory.response_ids),
                score=trajectory.rewards.total(options.tool_reward_weight, options.score_weight),
                texts=[decode(segment.token_ids) for segment in trajectory.segments],
            )
        )
    write_rollouts(folder, step, records)


def _objects(values: Any) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = list(values)
    return column
