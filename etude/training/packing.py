"""From padded batch columns to packed rows of tokens, and back.

Invariant: packing drops padding, and tokens on which no scored one depends, and nothing else; a scored token is one
whose `response_mask` is 1, and only the hidden states that predict scored tokens are ever multiplied with the vocabulary.
Rows without a scored token are not computed, and a prompt that several rows share is computed once.
"""

from __future__ import annotations

from collections import defaultdict
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
    prompts = attention[:, :prompt_width].sum(dim=1)
    row, column = mask.nonzero(as_tuple=True)
    orphans = (prompts[row] + column == 0).nonzero()
    if len(orphans):
        first = rows[int(row[orphans[0]])]
        raise DataError(f"row {first}: its first token is to be learned but nothing precedes it: give it a prompt")
    sequences = [tokens[kept] for tokens, kept in zip(ids, _needed(attention, mask))]
    token_ids, layout, prompt_ends, starts = _lay_out(sequences, prompts.tolist())
    return PackedRows(
        token_ids=token_ids.to(device),
        layout=layout,
        source=torch.where(column > 0, starts[row] + column, prompt_ends[row]).sub(1).to(device),
        labels=ids[row, prompt_width + column].to(device),
        row=row.to(device),
        column=column.to(device),
        shape=(len(index), mask.shape[1]),
    )


def _lay_out(sequences: list[Tensor], prompts: list[int]) -> tuple[Tensor, CausalSequences, Tensor, Tensor]:
    """Lays sequences, whose first `prompts[i]` tokens are a prompt, end to end, with each shared prompt only once.

    Returns the tokens, their layout, and by row the positions just after the prompt's last token and of the response's
    first; they differ where prompts are shared.
    """
    sharing: dict[tuple[int, ...] | int, list[int]] = defaultdict(list)
    for i, (tokens, prompt) in enumerate(zip(sequences, prompts)):
        sharing[tuple(tokens[:prompt].tolist()) or i].append(i)
    pieces: list[Tensor] = []
    lengths: list[int] = []
    branches: list[list[int]] = []
    prompt_ends, starts = [0] * len(sequences), [0] * len(sequences)
    position = 0
    for members in sharing.values():
        prompt, shared = prompts[members[0]], len(members) > 1
        trunk = sequences[members[0]][: prompt if shared else None]
        tails = [sequences[i][prompt:] for i in members] if shared else []
        for i in members:
            prompt_ends[i] = starts[i] = position + prompt
        position += len(trunk)
        for i, tail in zip(members, tails):
            starts[i] = position
            position += len(tail)
        pieces += [trunk, *tails]
        lengths.append(len(trunk))
        branches.append([len(tail) for tail in tails if len(tail)])
    return torch.cat(pieces), CausalSequences(lengths, branches), torch.tensor(prompt_ends), torch.tensor(starts)


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
