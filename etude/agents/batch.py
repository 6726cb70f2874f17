"""From trajectories to the columns of a training batch.

Prompts are padded on the left, responses on the right, each to the longest of the batch. A dropped row keeps its place
with an empty response: its mask is all zero, so that it changes no loss, no advantage and no metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.agents.result import RolloutResult
from etude.protocol import DataProto
from etude.trajectory import Trajectory


def to_batch(results: Sequence[RolloutResult], pad_token_id: int) -> DataProto:
    """Columns `prompts` (batch, prompt_len), `responses`, `response_mask`, `rollout_log_probs` (batch, response_len),
    `input_ids`, `attention_mask`, `position_ids` (batch, prompt_len + response_len), and the object column `rollout`
    with the `RolloutResult`s."""
    trajectories = [r.trajectory or Trajectory("dropped", []) for r in results]
    prompt_width = max([1, *(len(t.prompt_ids) for t in trajectories)])
    response_width = max([1, *(t.response_length for t in trajectories)])
    prompts = _pad([t.prompt_ids for t in trajectories], prompt_width, pad_token_id, left=True)
    responses = _pad([t.response_ids for t in trajectories], response_width, pad_token_id)
    attention = torch.cat(
        [
            _pad([[1] * len(t.prompt_ids) for t in trajectories], prompt_width, 0, left=True),
            _pad([[1] * t.response_length for t in trajectories], response_width, 0),
        ],
        dim=1,
    )
    rollouts = np.empty(len(results), dtype=object)
    rollouts[:] = list(results)
    return DataProto.from_single_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "response_mask": _pad([t.response_mask for t in trajectories], response_width, 0),
            "rollout_log_probs": _pad([t.response_log_probs for t in trajectories], response_width, 0.0),
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
            "rollout": rollouts,
        }
    )


def rows_of(batch: DataProto) -> list[dict[str, Any]]:
    """The object columns as one mapping a row."""
    columns = batch.non_tensor_batch
    return [{name: column[i] for name, column in columns.items()} for i in range(len(batch))]


def token_level_scores(results: Sequence[RolloutResult], width: int, tool_weight: float, score_weight: float) -> Tensor:
    """(batch, width) rewards where they belong (`Trajectory.token_level_scores`); zeros for dropped rows."""
    rows = [r.trajectory.token_level_scores(tool_weight, score_weight) if r.trajectory else [] for r in results]
    return _pad(rows, width, 0.0)


def _pad(rows: Sequence[Sequence[float]], width: int, fill: float, left: bool = False) -> Tensor:
    out = torch.full((len(rows), width), fill)
    for i, row in enumerate(rows):
        if row:
            out[i, slice(width - len(row), None) if left else slice(None, len(row))] = torch.tensor(
                row, dtype=out.dtype
            )
    return out
