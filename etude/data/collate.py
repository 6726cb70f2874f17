"""`collate`: rows into one `DataProto`.

Invariant: every column has one entry per row, in the rows' order; values other than the prompt's tokens stay the row's own
objects. Responses are left to the rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.protocol import DataProto


def collate(rows: Sequence[Mapping[str, Any]], *, pad_token_id: int = 0, prompt_length: int | None = None) -> DataProto:
    """The rows as a batch.

    Tensors, all (batch, prompt_length) int64 and left-padded: `input_ids`, `attention_mask`, `position_ids` (0 on
    padding). Every other key, `raw_prompt_ids` included, becomes an object array (batch,); a row without it has None.

    Args:
        rows: items of `RLDataset`.
        pad_token_id: the padding id; padding is masked.
        prompt_length: width of the tensors; None for the longest prompt of the batch.

    Raises:
        ValueError: there are no rows, or a prompt is longer than `prompt_length`.
    """
    import torch  # imported here: preparing and checking data needs no torch

    from etude.protocol import DataProto

    if not rows:
        raise ValueError("a batch needs at least one row")
    lengths = [len(row["raw_prompt_ids"]) for row in rows]
    width = max(lengths) if prompt_length is None else prompt_length
    if max(lengths) > width:
        raise ValueError(f"a prompt of {max(lengths)} tokens does not fit prompt_length={width}")
    input_ids = torch.full((len(rows), width), pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for number, (row, length) in enumerate(zip(rows, lengths)):
        input_ids[number, width - length :] = torch.tensor(row["raw_prompt_ids"], dtype=torch.long)
        attention_mask[number, width - length :] = 1
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    columns: dict[str, Any] = {key: [row.get(key) for row in rows] for key in _keys(rows)}
    tensors = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    return DataProto.from_single_dict(columns | tensors)


def _keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))
