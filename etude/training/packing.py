"""From padded batch columns to packed rows of tokens, and back.

Invariant: packing drops padding, and tokens on which no scored one depends, and nothing else; a scored token is one
whose `response_mask` is 1, and only the hidden states that predict scored tokens are ever multiplied with the vocabulary.
Rows without a scored token are not computed, and what several rows begin with (a prompt, a habit of the policy) is
computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
    sequences = needed_tokens(batch, rows)
    token_ids, layout, places = prefix_tree(sequences)
    offsets = torch.tensor([0, *accumulate(len(tokens) for tokens in sequences)])
    source = torch.tensor(places)[offsets[row] + prompts[row] + column - 1]
    return PackedRows(
        token_ids=torch.tensor(token_ids, device=device),
        layout=layout,
        source=source.to(device),
        labels=ids[row, prompt_width + column].to(device),
        row=row.to(device),
        column=column.to(device),
        shape=(len(index), mask.shape[1]),
    )


MIN_SHARED = 8  # tokens: a shorter shared run costs more in attention calls than it saves


def prefix_tree(sequences: Sequence[Sequence[int]]) -> tuple[list[int], CausalSequences, list[int]]:
    """Lays sequences out as a tree in which every beginning of at least `MIN_SHARED` shared tokens stands once.

    Returns the laid-out tokens, their layout, and for every token of the sequences, one after another, its place among
    the laid-out ones.
    """
    order = sorted(range(len(sequences)), key=lambda i: list(sequences[i]))
    shared = [_common(sequences[a], sequences[b]) for a, b in pairwise(order)]
    tokens: list[int] = []
    lengths: list[int] = []
    ancestors: list[tuple[int, ...]] = []
    places: list[list[int]] = [[] for _ in sequences]

    def add(members: Sequence[int], run: Sequence[int], up: tuple[int, ...]) -> tuple[int, ...]:
        for member in members:
            places[member] += range(len(tokens), len(tokens) + len(run))
        tokens.extend(run)
        lengths.append(len(run))
        ancestors.append(up)
        return (*up, len(lengths) - 1)

    # Work items: sorted sequences [low, high), which have `depth` tokens laid out in the runs `up`.
    work: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())] if order else []
    while work:
        low, high, depth, up = work.pop()
        first = sequences[order[low]]
        common = min(shared[low : high - 1], default=len(first))
        if common > depth and (high - low == 1 or common >= depth + MIN_SHARED):
            up, depth = add(order[low:high], first[depth:common], up), common
        if high - low > 1:
            cuts = [low, *(i + 1 for i in range(low, high - 1) if shared[i] < depth + MIN_SHARED), high]
            work += [(a, b, depth, up) for a, b in reversed(list(pairwise(cuts)))]
    return tokens, CausalSequences(lengths, ancestors), [place for row in places for place in row]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning, found by halving: slices compare far faster than their tokens do."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _needed(attention: Tensor, mask: Tensor) -> Tensor:
    """(rows, width) of bool: tokens before each row's last scored one (that one is a label, never a context)."""
    prompt_width = attention.shape[1] - mask.shape[1]
    last = (mask * torch.arange(mask.shape[1])).amax(dim=1)
    return attention & (torch.arange(attention.shape[1]) < prompt_width + last[:, None])


def scored_rows(batch: DataProto) -> list[int]:
    """Indices of rows with at least one scored token."""
    return batch.batch["response_mask"].any(dim=1).nonzero().squeeze(1).tolist()


def needed_tokens(batch: DataProto, rows: Sequence[int]) -> list[list[int]]:
    """For each of `rows` the tokens that `pack` lays down, before what several rows share is merged."""
    index = torch.as_tensor(list(rows), dtype=torch.long)
    attention, mask = batch.batch["attention_mask"][index].bool(), batch.batch["response_mask"][index].bool()
    return [ids[kept].tolist() for ids, kept in zip(batch.batch["input_ids"][index], _needed(attention, mask))]
