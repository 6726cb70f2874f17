"""Advantage estimators for agents: credit of a rollout as a whole, and of each of its turns.

A turn's return is G_k = r_k + γ G_{k+1}, r_k the sum of the rewards on its tokens (and on those of tools and templates after
them). It is compared with that of other turns that stood where it did; a turn compared with none gets the rollout's credit
alone. All advantages of a turn's tokens are equal.

Invariant: as in `advantages`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.algorithms.groups import GroupIds, centre, compare, group_keys, number_turns, spread
from etude.algorithms.records import Singleton


def turn_grpo(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    turns: Tensor | None = None,
    gamma: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    singleton_advantage: Singleton = "zero",
    step_advantage_w: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """GRPO's advantage of the rollout + `step_advantage_w` · that of the turn among the turns of the same number in its
    group (after arXiv 2505.11821; with γ = 0 a turn is judged by its own reward alone)."""
    return gigpo(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        index=index,
        observations=number_turns(response_mask, turns)[0],
        turns=turns,
        gamma=gamma,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        singleton_advantage=singleton_advantage,
        step_advantage_w=step_advantage_w,
    )


def gigpo(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    observations: Tensor,
    turns: Tensor | None = None,
    gamma: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    singleton_advantage: Singleton = "zero",
    step_advantage_w: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """GiGPO (arXiv 2505.10978): GRPO's advantage of the rollout + `step_advantage_w` · that of the turn among all turns of
    its group that answered an identical observation.

    Args:
        observations: (batch, response_len) integers, equal for the tokens of turns that answered the same.
    """
    mask = response_mask > 0
    rewards, by_std = token_level_rewards, norm_adv_by_std_in_grpo
    totals, valid = rewards.sum(dim=1), mask.any(dim=1)
    whole = compare(totals, valid, index, lambda group, _: centre(group, by_std), singleton_advantage)
    numbers, begins = number_turns(mask, turns)
    rows, places = begins.nonzero(as_tuple=True)  # of each turn, its row and first sampled token
    of_row = numbers[rows, places]
    returns = torch.zeros(len(mask), int(numbers.max()) + 1, dtype=rewards.dtype).scatter_add_(1, numbers, rewards)
    for k in range(returns.shape[1] - 2, -1, -1):
        returns[:, k] += gamma * returns[:, k + 1]
    uids = group_keys(index)
    keys = [(uids[row], stood) for row, stood in zip(rows.tolist(), observations[rows, places].tolist())]
    found = compare(returns[rows, of_row], mask[rows, places], keys, lambda group, _: centre(group, by_std))
    steps = torch.zeros_like(returns).index_put((rows, of_row), found)
    advantages = spread(whole, mask) + mask * step_advantage_w * steps.gather(1, numbers)
    return advantages, advantages
