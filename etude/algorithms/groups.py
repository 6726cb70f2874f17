"""What estimators share: comparisons within a group, whitening, and the turns of a row.

Invariant: rows whose mask is all zero (padding, dropped trajectories) enter no mean, no spread and no group size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from etude.algorithms.aggregation import equal_scores, masked_mean
from etude.algorithms.records import Singleton

GroupIds: TypeAlias = Sequence[Hashable] | np.ndarray | Tensor
EPSILON = 1e-6  # beside a standard deviation


def group_keys(index: GroupIds) -> Sequence[Hashable]:
    """The group ids as keys of a dict."""
    return index.tolist() if isinstance(index, np.ndarray | Tensor) else index


def group_rows(index: GroupIds, valid: Tensor) -> list[list[int]]:
    """The valid rows of each group, in order of first appearance."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, (key, counts) in enumerate(zip(group_keys(index), valid.tolist(), strict=True)):
        if counts:
            members[key].append(row)
    return list(members.values())


def compare(
    scores: Tensor,
    valid: Tensor,
    index: GroupIds,
    judge: Callable[[Tensor, list[int]], Tensor],
    singleton: Singleton = "zero",
) -> Tensor:
    """(batch,) advantages of (batch,) scores: `judge(scores of a group, its rows)` in each group of two or more whose scores
    differ, exactly 0 where they are equal (rounding divided by ε is no advantage), and in a group of one 0 or its raw score.
    """
    advantages = torch.zeros_like(scores)
    for members in group_rows(index, valid):
        group = scores[members]
        if len(members) == 1:
            advantages[members] = group if singleton == "raw" else 0.0
        elif not equal_scores(group):
            advantages[members] = judge(group, members)
    return advantages


def centre(scores: Tensor, by_std: bool) -> Tensor:
    """Scores − mean, divided by (std + ε), the unbiased one, if `by_std`."""
    centred = scores - scores.mean()
    return centred / (scores.std() + EPSILON) if by_std else centred


def spread(advantages: Tensor, mask: Tensor) -> Tensor:
    """(batch, response_len) of (batch,): each row's value on its sampled tokens, 0 elsewhere."""
    return torch.where(mask > 0, advantages[:, None], 0.0)


def whiten_masked(values: Tensor, mask: Tensor) -> Tensor:
    """Zero mean and unit (unbiased) variance over the mask; 0 elsewhere, and everywhere if the values are equal."""
    mask = mask > 0
    if not mask.any() or equal_scores(torch.broadcast_to(values, mask.shape)[mask]):
        return torch.zeros(mask.shape, dtype=values.dtype)
    centred = torch.where(mask, values - masked_mean(values, mask), 0.0)
    variance = centred.square().sum() / (mask.sum() - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)


def number_turns(mask: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor]:
    """The number of each token's turn, from 0 and without gaps, and whether a turn's sampled tokens begin there; each is
    (batch, response_len).

    Only turns with sampled tokens count; masked tokens belong to the turn before them, and those before all turns to the
    first. `turns` grows along a row; None: each run of sampled tokens is a turn.
    """
    mask = mask > 0
    if turns is None:
        turns = (mask & ~_shift(mask, False)).long().cumsum(dim=1)
    seen = torch.where(mask, turns, -1).cummax(dim=1).values
    begins = seen > _shift(seen, -1)
    return (begins.long().cumsum(dim=1) - 1).clamp(min=0), begins


def _shift(values: Tensor, first: float) -> Tensor:
    """`values` one place later, with `first` before them."""
    return torch.cat([torch.full_like(values[:, :1], first), values[:, :-1]], dim=1)
