"""From padded batch columns to packed rows of tokens, and back.

Invariant: packing drops padding, and tokens on which no scored one depends, and nothing else; a scored token is one
whose `response_mask` is 1, and only the hidden states that predict scored tokens are ever multiplied with the vocabulary.
Rows without a scored token are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.errors import DataError
from etude.models.packed import CausalSequences
from etude.protocol import DataProto


@dataclass(frozen=True)
class PackedRows:
    """Rows of a batch laid end to end.

    `token_ids` (tokens,); `source` (scored,): packed position whose hidden state predicts each scored token; `labels`
    (scored,); `row`, `column` (scored,): the token's place in the (rows, response_len) matrix.
    """

    token_ids: Tensor
    layout: CausalSequences
    source: Tensor
    labels: Tensor
    row: Tensor
    column: Tensor
    shape: tuple[int, int]

    def scatter(self, values: Tensor) -> Tensor:
        """(scored,) values into a (rows, response_len) matrix of zeros; differentiable."""
        return values.new_zeros(self.shape).index_put((self.row, self.column), values)


def pack(batch: DataProto, rows: Sequence[int], device: torch.device) -> PackedRows:
    """Packs the given rows; see `PackedRows`. Needs `input_ids`, `attention_mask`, `response_mask`.

    Raises:
        DataError: a row's very first token is scored, which nothing can predict.
    """
    index = torch.as_tensor(list(rows))
    ids, mask = batch.batch["input_ids"][index], batch.batch["response_mask"][index].bool()
    attention = batch.batch["attention_mask"][index].bool()
    prompt_width = ids.shape[1] - mask.shape[1]
    needed = _needed(attention, mask)
    lengths = needed.sum(dim=1)
    starts = lengths.cumsum(0) - lengths
    prompt_lengths = attention[:, :prompt_width].sum(dim=1)
    row, column = mask.nonzero(as_tuple=True)
    position = prompt_lengths[row] + column
    if not position.all():
        first = rows[int(row[position == 0][0])]
        raise DataError(f"row {first}: its first token is to be learned but nothing precedes it: give it a prompt")
    return PackedRows(
        token_ids=ids[needed].to(device),
        layout=CausalSequences(lengths.tolist()),
        source=(starts[row] + position - 1).to(device),
        labels=ids[row, prompt_width + column].to(device),
        row=row.to(device),
        column=column.to(device),
        shape=(len(index), mask.shape[1]),
    )


def _needed(attention: Tensor, mask: Tensor) -> Tensor:
    """(rows, width) of bool: tokens before each row's last scored one (that one is a label, never a context)."""
    prompt_width = attention.shape[1] - mask.shape[1]
    last = (mask * torch.arange(mask.shape[1])).amax(dim=1)
    return attention & (torch.arange(attention.shape[1]) < prompt_width + last[:, None])


def scored_rows(batch: DataProto) -> list[int]:
    """Indices of rows with at least one scored token."""
    return batch.batch["response_mask"].any(dim=1).nonzero().squeeze(1).tolist()


def row_lengths(batch: DataProto) -> list[int]:
    """Tokens that `pack` lays down for each row."""
    return _needed(batch.batch["attention_mask"].bool(), batch.batch["response_mask"].bool()).sum(dim=1).tolist()
