"""Dynamic sampling (`algorithm.filter_groups`): a group whose rollouts are all worth the same teaches a group-relative
estimator nothing, so it is left out of the step, and further prompts may fill its place.

    count_spread     of rollouts as they come: whether enough such groups are there, or further prompts are rolled out
                     (the feeds of `rollout_source`)
    choose_groups    of the batch, after its advantages: the rows of those that the step trains on (`training_step`)

Invariant: both find the same groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from etude.algorithms import equal_scores
from etude.distributed import reads
from etude.errors import DataError
from etude.options import TrainOptions
from etude.protocol import DataProto
from etude.trainer.metrics import Metrics
from etude.trainer.rollouts import (
    MAIN_SEQUENCE,
    ROLE,
    main_rows,
    part_totals,
    parts_of,
    role_scores,
    rollout_numbers,
    rollouts_of,
    sampled_earlier,
    survivor_rows,
)
from etude.trajectory import Rollout, role_name

_TOTALS = ("reward", "seq_reward", "seq_final_reward")  # `filter_groups.metric` values that mean the total reward


@reads("rollout", "response_mask", "reward_baselines", "uid")
def count_spread(made: DataProto, options: TrainOptions, min_fraction: float = 0.0) -> int:
    """Number of the groups of rollouts, not expanded yet, that `spread_groups` will find in them.

    Raises:
        TrainingStopped: infrastructure failures dropped too large a share.
    """
    kept, metric = made.select_idxs(survivor_rows(made, min_fraction)), options.algorithm.filter_groups.metric
    scores: dict[Any, list[float]] = defaultdict(list)
    for uid, rollout in zip(kept.non_tensor_batch["uid"].tolist(), rollouts_of(kept)):
        if metric is not None and metric not in _TOTALS:
            scores[uid, ""].append(_reported(rollout, metric))
            continue
        totals = {each.role: 0.0 for each in (rollout.sequences[-1], *sampled_earlier(rollout))}
        for each, own in zip(rollout.sequences, role_scores(rollout, options.reward_model)):
            totals[each.role] = totals.get(each.role, 0.0) + sum(own)
        for role, total in totals.items():
            scores[uid, role_name(role)].append(total)
    return len({uid for uid, _ in _differing(scores)})


def choose_groups(batch: DataProto, options: TrainOptions) -> tuple[list[int], Metrics]:
    """Chooses the rows of at most `train_batch_size` groups whose scores differ; reads `spread_columns`. The metrics count
    prompts left out for equal scores or as surplus, and prompts missing from a full batch."""
    groups = len(set(batch.non_tensor_batch["uid"].tolist())) if len(batch) else 0
    spread = spread_groups(batch, options.algorithm.filter_groups.metric) if groups else []
    name, wanted = "training/filter_groups", options.data.train_batch_size
    return [row for rows in spread[:wanted] for row in rows], {
        f"{name}/evicted_samples": float(groups - len(spread)),
        f"{name}/discarded_surplus_samples": float(max(len(spread) - wanted, 0)),
        f"{name}/missing_samples": float(max(wanted - len(spread), 0)),
    }


def spread_columns(metric: str | None) -> frozenset[str]:
    """The columns that `spread_groups` reads."""
    columns = frozenset({"token_level_scores", "uid", MAIN_SEQUENCE, ROLE})
    return columns if metric is None or metric in _TOTALS else columns | {"rollout"}


def spread_groups(batch: DataProto, metric: str | None = None) -> list[list[int]]:
    """Returns the row indices of each group whose rollouts differ in `metric` (see `filter_groups.metric`; default: total
    reward, of any role). A group-relative estimator learns only from these.

    Raises:
        DataError: the scorer does not report `metric`; names the row.
    """
    main, uids = main_rows(batch).tolist(), batch.non_tensor_batch["uid"].tolist()
    scores: dict[Any, list[float]] = defaultdict(list)
    if metric is None or metric in _TOTALS:
        parts = parts_of(batch)
        for key, total in zip(parts.groups, part_totals(batch, parts).tolist()):
            scores[key].append(total)
    else:
        for uid, result, is_main in zip(uids, rollouts_of(batch), main):
            if is_main:
                scores[uid].append(_reported(result, metric))
    uids_that_differ = {key[0] if isinstance(key, tuple) else key for key in _differing(scores)}
    groups: dict[Any, list[int]] = defaultdict(list)
    for row, uid in enumerate(uids):
        groups[uid].append(row)
    return [rows for uid, rows in groups.items() if uid in uids_that_differ]


def _differing(scores: Mapping[Any, Sequence[float]]) -> list[Any]:
    """The groups whose scores differ by more than rounding."""
    return [key for key, values in scores.items() if not equal_scores(torch.tensor(values, dtype=torch.float64))]


def _reported(rollout: Rollout, metric: str) -> float:
    """Returns the number that the scorer reported as `metric`."""
    assert rollout.trajectory is not None
    rewards = rollout.trajectory.rewards
    value = rewards.score if metric == "score" else rewards.score_info.get(metric)
    if isinstance(value, bool | int | float):
        return float(value)
    known = ", ".join(["reward", "score"][: 1 + (rewards.score is not None)] + sorted(rewards.score_info))
    raise DataError(
        f"algorithm.filter_groups.metric={metric}: the scorer reports no such number for {rollout.trajectory.request_id} "
        f"(known: {known})"
    )


def equal_group_metrics(batch: DataProto) -> dict[str, float]:
    """`rollout/equal_groups_share`: of the groups (same `uid`, and role if there are several) of two or more rollouts, the
    share whose rewards, summed over their sequences, are all equal (see `equal_scores`); a group-relative estimator learns
    nothing from them. Reads `token_level_scores` and `response_mask` (batch, response_len); a dropped rollout is in no
    group."""
    if "token_level_scores" not in batch.batch.keys() or "uid" not in batch.non_tensor_batch:  # noqa: SIM118
        return {}
    parts, rollouts = parts_of(batch), rollout_numbers(batch)
    kept = torch.isin(rollouts[parts.first], rollouts[batch.batch["response_mask"].bool().any(-1)])
    scores: dict[Any, list[float]] = defaultdict(list)
    for key, total, is_kept in zip(parts.groups, part_totals(batch, parts).tolist(), kept.tolist()):
        if is_kept:
            scores[key].append(total)
    compared = {key: values for key, values in scores.items() if len(values) > 1}
    equal = len(compared) - len(_differing(compared))
    return {"rollout/equal_groups_share": equal / len(compared)} if compared else {}
