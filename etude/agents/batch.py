"""Converts trajectories to the columns of a training batch.

Prompts are padded on the left, responses on the right, each to the longest in the batch. A dropped row keeps its position
with an empty response: its mask is all zeros, so it affects no loss, advantage or metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.distributed import BatchRef, DispatchMode
from etude.distributed.dispatch import Arguments
from etude.errors import DataError
from etude.options import RewardOptions
from etude.protocol import DataProto, object_array
from etude.rewards.finite import MAX_REWARD
from etude.trajectory import KEPT_IDS, ROUTED_EXPERTS, Rollout, Trajectory

IMAGES = "multi_modal_inputs"
OF_SEQUENCES: dict[str, Any] = {IMAGES: (), KEPT_IDS: (), ROUTED_EXPERTS: None}
"""Object columns that a batch has only if one of its sequences needs them, with the value for the other rows."""


def to_batch(rollouts: Sequence[Rollout], pad_token_id: int) -> DataProto:
    """Builds a batch with the columns `prompts` (batch, prompt_len), `responses`, `response_mask`, `rollout_log_probs`
    (batch, response_len), `input_ids`, `attention_mask`, `position_ids` (batch, prompt_len + response_len), and the object
    column `rollout` with the `Rollout`s.

    If any row has images, also `multi_modal_inputs`, a tuple of images per row; if any was sampled with top-k or top-p,
    `kept_ids`; if the engine returns them, `routed_experts`.
    """
    trajectories = [r.trajectory or Trajectory("dropped", []) for r in rollouts]
    responses = pad_rows([t.response_ids for t in trajectories], pad_token_id)
    prompts = pad_rows([t.prompt_ids for t in trajectories], pad_token_id, left=True)
    lengths = torch.tensor([[len(t.prompt_ids), t.response_length] for t in trajectories]).reshape(-1, 2)
    before = torch.arange(-prompts.shape[1], 0) >= -lengths[:, :1]
    after = torch.arange(responses.shape[1]) < lengths[:, 1:]
    attention = torch.cat([before, after], dim=1).long()
    own: dict[str, list[Any]] = {
        IMAGES: [tuple(t.images) for t in trajectories],
        KEPT_IDS: [t.kept_ids for t in trajectories],
        ROUTED_EXPERTS: [t.routed_experts for t in trajectories],
    }
    return DataProto.from_single_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "response_mask": pad_rows([t.response_mask for t in trajectories], 0),
            "rollout_log_probs": pad_rows([t.response_log_probs for t in trajectories], 0.0),
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
            "rollout": list(rollouts),
        }
        | {name: values for name, values in own.items() if any(values)}
    )


def concat_batches(parts: Sequence[DataProto]) -> DataProto:
    """Concatenates batches of different widths, padding prompts on the left and responses on the right. Without the columns
    `prompts` and `responses`, which tell the widths, tensors must have equal ones."""
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    for part in parts:
        for name in names:  # batches may have different columns
            part.non_tensor_batch.setdefault(name, object_array([OF_SEQUENCES.get(name)] * len(part)))
    if not all({"prompts", "responses"} <= part.columns for part in parts):
        return DataProto.concat(parts)
    prompt = max(part.batch["prompts"].shape[1] for part in parts)
    response = max(part.batch["responses"].shape[1] for part in parts)
    for part in parts:
        left = prompt - part.batch["prompts"].shape[1]
        right = response - part.batch["responses"].shape[1]
        for name, tensor in list(part.batch.items()):
            lead = left if name in ("prompts", "input_ids", "attention_mask", "position_ids") else 0
            tail = 0 if name == "prompts" else right
            part.batch[name] = torch.nn.functional.pad(tensor, (lead, tail))
    return DataProto.concat(parts)


def _divide_groups(shards: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
    data, *others = args
    return [((data.select_idxs(rows), *others), kwargs) for rows in _shards_of(data, shards)]


def _concat_groups(results: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    filled = _shards_of(args[0], len(results))
    parts = [result for result, rows in zip(results, filled) if rows] or results[:1]
    order = [row for rows in filled for row in rows]
    if isinstance(parts[0], BatchRef):
        return BatchRef.concat(parts, concat_batches).select_idxs(np.argsort(order))  # concatenated where it is fetched
    whole = concat_batches(parts) if len(parts) > 1 else DataProto.concat(parts)
    if order != sorted(order):
        whole.reorder(torch.tensor(order).argsort())
    return whole


def _shards_of(data: DataProto | BatchRef, shards: int) -> list[list[int]]:
    """Returns the rows of each shard: whole groups, about equally many rows each, in order if groups are contiguous."""
    groups: dict[Any, list[int]] = {}
    uids = data.ids if isinstance(data, BatchRef) else data.non_tensor_batch.get("uid", np.arange(len(data)))
    for row, uid in enumerate(uids.tolist()):
        groups.setdefault(uid, []).append(row)
    filled: list[list[int]] = [[] for _ in range(shards)]
    done = 0
    for rows in groups.values():
        filled[(2 * done + len(rows)) * shards // (2 * len(data))] += rows
        done += len(rows)
    return filled


BY_GROUP = DispatchMode(_divide_groups, _concat_groups)
"""Dispatches whole groups (rows that share a `uid`) to ranks, without duplicating rows; a rank may get none. Collects the
results into one batch, in row order."""


def rows_of(batch: DataProto) -> list[dict[str, Any]]:
    """Returns the object columns as one dict per row."""
    columns = batch.non_tensor_batch
    return [{name: column[i] for name, column in columns.items()} for i in range(len(batch))]


def token_level_scores(rollouts: Sequence[Rollout], width: int, tool_weight: float, score_weight: float) -> Tensor:
    """Returns (batch, width) float64 rewards at their tokens (`Trajectory.token_level_scores`); zeros for dropped rows."""
    rows = [r.trajectory.token_level_scores(tool_weight, score_weight) if r.trajectory else [] for r in rollouts]
    return pad_rows(rows, 0.0, width=width, kind=np.float64)


def place_scores(batch: DataProto, reward: RewardOptions, rows: Sequence[dict[str, Any]] | None = None) -> None:
    """Adds the column `token_level_scores` (batch, response_len), float64, of the column `rollout`. `rows`: the rows, which
    errors name (default: the batch's own object columns).

    Raises:
        DataError: a reward is not finite or exceeds `MAX_REWARD`; names its row.
    """
    width, results = batch.batch["response_mask"].shape[1], batch.non_tensor_batch["rollout"].tolist()
    scores = token_level_scores(results, width, reward.tool_reward_weight, reward.score_weight)
    for number, result in enumerate(results):
        if result.trajectory is not None and not bool((scores[number].abs() <= MAX_REWARD).all()):
            row, rewards = (rows or rows_of(batch))[number], result.trajectory.rewards
            names = {name: row[name] for name in ("data_source", "index", "uid") if name in row}
            raise DataError(
                f"row {names}: rewards must be finite and at most {MAX_REWARD:g} in size: steps {rewards.steps}, "
                f"final {rewards.final}, score {rewards.score}"
            )
    batch.batch["token_level_scores"] = scores


def pad_rows(
    rows: Sequence[Sequence[float]], fill: float, *, width: int = 1, left: bool = False, kind: type | None = None
) -> Tensor:
    """Pads `rows` on the right, or on the left with `left`, to a (rows, max(longest, `width`)) tensor of dtype `kind`, by
    default int64 or float32 after `fill`. Converts the whole batch at once."""
    lengths = np.array([len(row) for row in rows])
    width = max(width, int(lengths.max(initial=0)))
    kind = kind or (np.float32 if isinstance(fill, float) else np.int64)
    matrix: np.ndarray = np.full((len(rows), width), fill, dtype=kind)
    places = np.arange(width)
    filled = places >= (width - lengths)[:, None] if left else places < lengths[:, None]
    matrix[filled] = np.fromiter(chain.from_iterable(rows), dtype=kind, count=int(lengths.sum()))
    return torch.from_numpy(matrix)
