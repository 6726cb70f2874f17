"""Micro-batches: rows that are packed and computed together, split by a token budget.

Invariant: every row with a scored token is in exactly one micro-batch. Rows with the same prompt stay together if the budget
allows, so that the prompt is computed once for all of them; shared tokens count once against the budget. A row longer than
the budget is a separate micro-batch. The split depends only on the batch and the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from etude.models.vision import Vision
from etude.protocol import DataProto
from etude.training.packing import needed_tokens, prefix_tree, scored_rows
from etude.training.partitions import balanced_partitions, token_budget_batches


def micro_batches(batch: DataProto, max_tokens: int, vision: Vision | None = None) -> list[list[int]]:
    """Returns the row indices of each micro-batch, sorted; needs `input_ids`, `attention_mask`, `response_mask`.

    `vision`: as for `pack`. An image counts as many tokens as it has placeholders.
    """
    rows = scored_rows(batch)
    tokens = dict(zip(rows, needed_tokens(batch, rows, vision)))
    units = [part for group in _groups(batch, rows) for part in _within_budget(group, tokens, max_tokens)]
    costs = [_cost([tokens[row] for row in unit]) for unit in units]
    parts = token_budget_batches(costs, max_tokens)
    return sorted(sorted(row for unit in part for row in units[unit]) for part in parts)


def filler() -> DataProto:
    """Returns a dummy batch, one row with one scored token: with a sharded model, a rank computes it while others still have
    micro-batches."""
    ids = torch.zeros(1, 2, dtype=torch.long)
    ones = torch.ones_like(ids)
    return DataProto.from_single_dict({"input_ids": ids, "attention_mask": ones, "response_mask": ones[:, 1:]})


def _groups(batch: DataProto, rows: Sequence[int]) -> list[list[int]]:
    """Groups rows by prompt. If the columns have no prompt part (demonstrations), each row is a group."""
    width = batch.batch["input_ids"].shape[1] - batch.batch["response_mask"].shape[1]
    prompts = batch.batch["input_ids"][:, :width].cpu().numpy()
    masks = batch.batch["attention_mask"][:, :width].cpu().numpy()
    groups: dict[object, list[int]] = {}
    for row in rows:
        groups.setdefault((prompts[row].tobytes(), masks[row].tobytes()) if width else row, []).append(row)
    return list(groups.values())


def _within_budget(group: list[int], tokens: dict[int, list[Any]], max_tokens: int) -> list[list[int]]:
    """Splits the group into as few parts of similar length as fit the budget."""
    lengths = [len(tokens[row]) for row in group]
    fewest = max(1, -(-_cost([tokens[row] for row in group]) // max_tokens))
    for count in range(fewest, len(group)):
        parts = [[group[i] for i in part] for part in balanced_partitions(lengths, count)]
        if all(_cost([tokens[row] for row in part]) <= max_tokens for part in parts):
            return parts
    return [[row] for row in group]


def _cost(sequences: Sequence[Sequence[Any]]) -> int:
    """Number of packed tokens for these sequences."""
    return len(prefix_tree(sequences)[0])
