"""From padded batch columns to packed rows of tokens, and back.

Invariant: packing drops padding and nothing else; a scored token is one whose `response_mask` is 1, and only the hidden
states that predict scored tokens are ever multiplied with the vocabulary. Rows without a scored token are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Packs the given rows; see `PackedRows`. Needs `input_ids`, `attention_mask`, `response_mask`."""
    index = torch.as_tensor(list(rows))
    ids, attention = batch.batch["input_ids"][index], batch.batch["attention_mask"][index].bool()
    mask = batch.batch["response_mask"][index].bool()
    width = mask.shape[1]
    lengths = attention.sum(dim=1)
    starts = lengths.cumsum(0) - lengths
    prompt_lengths = attention[:, : ids.shape[1] - width].sum(dim=1)
    row, column = mask.nonzero(as_tuple=True)
    position = starts[row] + prompt_lengths[row] + column
    tokens = ids[attention]
    return PackedRows(
        token_ids=tokens.to(device),
        layout=CausalSequences(lengths.tolist()),
        source=(position - 1).to(device),
        labels=tokens[position].to(device),
        row=row.to(device),
        column=column.to(device),
        shape=(len(index), width),
    )


def scored_rows(batch: DataProto) -> list[int]:
    """Indices of rows with at least one scored token."""
    return batch.batch["response_mask"].any(dim=1).nonzero().squeeze(1).tolist()


def row_lengths(batch: DataProto) -> list[int]:
    """Tokens a row, padding left out."""
    return batch.batch["attention_mask"].sum(dim=1).tolist()
