"""Advantage estimators: rewards (and values) to per-token advantages.

Invariant: rows whose mask is all zero (padding, dropped trajectories) enter no mean, no spread and no group size, and their
advantages are 0. Masked tokens (tool output, template glue) have advantage 0, and their values, even non-finite ones, change
nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from etude.algorithms.aggregation import equal_scores, masked_mean
from etude.algorithms.records import ADVANTAGE_ESTIMATORS, COLUMNS
from etude.errors import ConfigError

GroupIds: TypeAlias = Sequence[Hashable] | np.ndarray | Tensor


def compute_advantage(
    name: str,
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds | None = None,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, each (batch, response_len), by the estimator registered as `name`. They are computed
    in float64, and returned in the rewards' type.

    Args:
        token_level_rewards: (batch, response_len).
        response_mask: (batch, response_len), 1 for sampled tokens.
        index: (batch,) group ids of any hashable kind; rows of one prompt share an id.
        values: (batch, response_len), for estimators that need a critic.
        options: the estimator's options, and the other columns that it needs.

    Raises:
        ConfigError: unknown estimator, or an argument that it needs is missing.
    """
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    given = {"values": values, **options}
    for column in sorted(estimator.needs):
        if given.get(column) is None:
            raise ConfigError(f"algorithm.adv_estimator={name} needs {column}: {COLUMNS[column]}")
    if index is None and estimator.min_group > 1:
        raise ConfigError(f"algorithm.adv_estimator={name} needs group ids")
    given |= {option: value for option, value in (("gamma", gamma), ("lam", lam)) if estimator.reads(option)}
    advantages, returns = estimator(
        token_level_rewards=token_level_rewards.double(),
        response_mask=response_mask,
        index=index,
        **{n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in given.items()},
    )
    kind = token_level_rewards.dtype
    return advantages.to(kind), returns.to(kind)


def grpo(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300, section 4.1): (r − mean_g) / (std_g + ε), the spread
    unbiased; without the division with `norm_adv_by_std_in_grpo=False` (Dr. GRPO). A group with fewer than two valid rows
    contributes nothing."""
    mask = response_mask > 0
    # In double precision, and exactly 0 for equal scores: rounding errors divided by ε are not an advantage.
    scores = token_level_rewards.sum(dim=-1)
    advantages = torch.zeros_like(scores)
    for members in _groups(index, mask.any(dim=-1)):
        group = scores[members]
        if len(members) < 2 or equal_scores(group):
            continue
        centred = group - group.mean()
        advantages[members] = centred / (group.std() + epsilon) if norm_adv_by_std_in_grpo else centred
    spread = torch.where(mask, advantages[:, None], 0.0)
    return spread, spread


def _groups(index: GroupIds, valid: Tensor) -> list[list[int]]:
    """The valid rows of each group, in order of first appearance."""
    keys = index.tolist() if isinstance(index, np.ndarray | Tensor) else index
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, (key, counts) in enumerate(zip(keys, valid.tolist(), strict=True)):
        if counts:
            members[key].append(row)
    return list(members.values())


def gae(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    gamma: float,
    lam: float,
    whiten: bool = True,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) along the *sampled* tokens: masked tokens are skipped, so
    that a tool's answer is not discounted. Returns are advantages + values; advantages are then whitened over the mask. A
    reward on a masked token counts at the sampled token before it."""
    mask = response_mask > 0
    width = values.shape[1]
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage, pending = next_value.clone(), next_value.clone()
    for t in range(width - 1, -1, -1):
        m = mask[:, t]
        reward = token_level_rewards[:, t] + pending
        delta = reward + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(m, advantage, 0.0)
        pending = torch.where(m, 0.0, reward)
        next_value = torch.where(m, values[:, t], next_value)
        next_advantage = torch.where(m, advantage, next_advantage)
    returns = torch.where(mask, advantages + values, 0.0)
    return (whiten_masked(advantages, mask) if whiten else advantages), returns


def whiten_masked(values: Tensor, mask: Tensor) -> Tensor:
    """Zero mean and unit (unbiased) variance over the mask; 0 elsewhere."""
    mask = mask > 0
    centred = torch.where(mask, values - masked_mean(values, mask), 0.0)
    variance = centred.square().sum() / (mask.sum() - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)
