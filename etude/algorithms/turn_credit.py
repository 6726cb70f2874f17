"""Advantage estimators for agents: credit for the whole rollout plus credit for each turn.

A turn's return is G_k = r_k + γ G_{k+1}, where r_k sums the rewards on its tokens (and on the tool and template tokens after
them). It is compared with the returns of other turns in the same situation; a turn without any to compare with gets the
rollout's credit alone. All tokens of a turn have the same advantage. `Rollout.token_level_scores` (`etude.trajectory`) puts
rewards on tokens.

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
    """GRPO's advantage of the rollout + `step_advantage_w` · the turn's advantage among the turns with the same number in
    its group (after arXiv 2505.11821; with γ = 0 a turn is judged by its own reward alone)."""
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
    """GiGPO (arXiv 2505.10978): GRPO's advantage of the rollout + `step_advantage_w` · the turn's advantage among all turns
    of its group with an identical observation.

    Args:
        observations: (batch, response_len) integers, equal for the tokens of turns with the same observation.
    """
    mask = response_mask > 0
    rewards, by_std = token_level_rewards, norm_adv_by_std_in_grpo
    totals, valid = rewards.sum(dim=1), mask.any(dim=1)
    whole = compare(totals, valid, index, lambda group, _: centre(group, by_std), singleton_advantage)
    numbers, begins = number_turns(mask, turns)
    rows, places = begins.nonzero(as_tuple=True)  # each turn's row and first sampled token
    of_row = numbers[rows, places]
    returns = torch.zeros(len(mask), int(numbers.max()) + 1, dtype=rewards.dtype).scatter_add_(1, numbers, rewards)
    for k in range(returns.shape[1] - 2, -1, -1):
        returns[:, k] += gamma * returns[:, k + 1]
    uids = group_keys(index)
    keys = [(uids[row], stood) for row, stood in zip(rows.tolist(), observations[rows, places].tolist())]
    found = compare(returns[rows, of_row], mask[rows, places], keys, lambda group, _: centre(group, by_std))
    steps = torch.zeros_like(returns).index_put((rows, of_row), found)
    advantages = spread(whole, mask) + mask * (step_advantage_w * steps.gather(1, numbers))
    return advantages, advantages
