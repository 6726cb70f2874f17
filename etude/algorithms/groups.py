"""Building blocks of the estimators: comparison within groups, whitening, and numbering of turns.

Invariant: rows whose mask is all zero (padding, dropped trajectories) are excluded from means, standard deviations and group
sizes.
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
EPSILON = 1e-6  # added to standard deviations


def group_keys(index: GroupIds) -> Sequence[Hashable]:
    """Returns the group ids as dict keys."""
    return index.tolist() if isinstance(index, np.ndarray | Tensor) else index


def group_rows(index: GroupIds, valid: Tensor) -> list[list[int]]:
    """Returns the valid rows of each group, groups in order of first appearance."""
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
    """(batch,) advantages from (batch,) scores. A group of two or more with differing scores gets `judge(scores of the
    group, its rows)`; equal scores get exactly 0 (so that rounding divided by ε is no advantage); a group of one gets 0 or
    its raw score."""
    advantages = torch.zeros_like(scores)
    for members in group_rows(index, valid):
        group = scores[members]
        if len(members) == 1:
            advantages[members] = group if singleton == "raw" else 0.0
        elif not equal_scores(group):
            advantages[members] = judge(group, members)
    return advantages


def centre(scores: Tensor, by_std: bool) -> Tensor:
    """Returns scores − mean, divided by (unbiased std + ε) if `by_std`."""
    centred = scores - scores.mean()
    return centred / (scores.std() + EPSILON) if by_std else centred


def spread(advantages: Tensor, mask: Tensor) -> Tensor:
    """Broadcasts (batch,) to (batch, response_len): each row's value on its sampled tokens, 0 elsewhere."""
    return torch.where(mask > 0, advantages[:, None], 0.0)


def whiten_masked(values: Tensor, mask: Tensor) -> Tensor:
    """Whitens to zero mean and unit (unbiased) variance over the mask; 0 elsewhere, and everywhere if all values are
    equal."""
    mask = mask > 0
    if not mask.any() or equal_scores(torch.broadcast_to(values, mask.shape)[mask]):
        return torch.zeros(mask.shape, dtype=values.dtype)
    centred = torch.where(mask, values - masked_mean(values, mask), 0.0)
    variance = centred.square().sum() / (mask.sum() - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)


def number_turns(mask: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the number of each token's turn, from 0 and without gaps, and whether the token is the first sampled one of
    its turn; each is (batch, response_len).

    Only turns with sampled tokens count; masked tokens belong to the preceding turn, and those before all turns to the
    first. `turns` increases along a row; None: each run of sampled tokens is a turn.
    """
    mask = mask > 0
    if turns is None:
        turns = (mask & ~_shift(mask, False)).long().cumsum(dim=1)
    seen = torch.where(mask, turns, -1).cummax(dim=1).values
    begins = seen > _shift(seen, -1)
    return (begins.long().cumsum(dim=1) - 1).clamp(min=0), begins


def _shift(values: Tensor, first: float) -> Tensor:
    """Shifts `values` right by one; the new first column is `first`."""
    return torch.cat([torch.full_like(values[:, :1], first), values[:, :-1]], dim=1)
