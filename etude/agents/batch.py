"""From trajectories to the columns of a training batch.

Prompts are padded on the left, responses on the right, each to the longest of the batch. A dropped row keeps its place
with an empty response: its mask is all zeros, so that it affects no loss, no advantage and no metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.protocol import DataProto, object_array
from etude.routed_experts import COLUMN as ROUTED_EXPERTS
from etude.trajectory import KEPT_IDS, Rollout, Trajectory

IMAGES = "multi_modal_inputs"
OF_SEQUENCES: dict[str, Any] = {IMAGES: (), KEPT_IDS: (), ROUTED_EXPERTS: None}
"""Object columns that a batch has if any of its sequences needs them, with what the others have there."""


def to_batch(rollouts: Sequence[Rollout], pad_token_id: int) -> DataProto:
    """Columns `prompts` (batch, prompt_len), `responses`, `response_mask`, `rollout_log_probs` (batch, response_len),
    `input_ids`, `attention_mask`, `position_ids` (batch, prompt_len + response_len), and the object column `rollout`
    with the `Rollout`s; if any row has images, also `multi_modal_inputs`, a tuple of them per row; if any was drawn with
    top-k or top-p, also `kept_ids`; if the engine keeps them, `routed_experts`."""
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


def add_missing_columns(parts: Sequence[DataProto]) -> None:
    """Gives every batch the columns of `OF_SEQUENCES` that any of them has, so that they can be concatenated."""
    for name, empty in OF_SEQUENCES.items():
        if any(name in part.non_tensor_batch for part in parts):
            for part in parts:
                part.non_tensor_batch.setdefault(name, object_array([empty] * len(part)))


def rows_of(batch: DataProto) -> list[dict[str, Any]]:
    """The object columns as one mapping per row."""
    columns = batch.non_tensor_batch
    return [{name: column[i] for name, column in columns.items()} for i in range(len(batch))]


def token_level_scores(rollouts: Sequence[Rollout], width: int, tool_weight: float, score_weight: float) -> Tensor:
    """(batch, width) rewards at their tokens (`Trajectory.token_level_scores`), in float64; zeros for dropped rows."""
    rows = [r.trajectory.token_level_scores(tool_weight, score_weight) if r.trajectory else [] for r in rollouts]
    return pad_rows(rows, 0.0, width=width, kind=np.float64)


def pad_rows(
    rows: Sequence[Sequence[float]], fill: float, *, width: int = 1, left: bool = False, kind: type | None = None
) -> Tensor:
    """(rows, longest or `width`) of `kind`, by default `fill`'s, int64 or float32, padded on the right or, with `left`, on
    the left: one conversion for the whole batch."""
    lengths = np.array([len(row) for row in rows])
    width = max(width, int(lengths.max(initial=0)))
    kind = kind or (np.float32 if isinstance(fill, float) else np.int64)
    matrix: np.ndarray = np.full((len(rows), width), fill, dtype=kind)
    places = np.arange(width)
    filled = places >= (width - lengths)[:, None] if left else places < lengths[:, None]
    matrix[filled] = np.fromiter(chain.from_iterable(rows), dtype=kind, count=int(lengths.sum()))
    return torch.from_numpy(matrix)
