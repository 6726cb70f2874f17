"""Advantage estimators with per-token credit: each token is judged by the rewards after it.

Invariant: masked tokens (tool output, template glue) have advantage 0 and are not time steps: returns skip them without
discounting, and their values, even non-finite ones, have no effect. A reward on a masked token counts at the preceding
sampled token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.algorithms.aggregation import equal_scores
from etude.algorithms.groups import GroupIds, group_rows, number_turns, spread, whiten_masked
from etude.algorithms.records import Singleton, TimestepUnit


def gae(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    turns: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    gae_timestep_unit: TimestepUnit = "token",
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) along the sampled tokens. Returns are advantages + values;
    advantages are then whitened over the mask.

    With `gae_timestep_unit="turn"`, γ and λ apply once per turn, between its last token and the next turn's first: within a
    turn both are 1, so that a long turn is not discounted more than a short one.
    """
    mask = response_mask > 0
    numbers, _ = number_turns(mask, turns)
    width = values.shape[1]
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage, pending = next_value.clone(), next_value.clone()
    next_number = torch.full_like(numbers[:, 0], -1)
    by_turn = gae_timestep_unit == "turn"
    one, step, trace = (torch.tensor(factor, dtype=values.dtype) for factor in (1.0, gamma, gamma * lam))
    for t in range(width - 1, -1, -1):
        m, within = mask[:, t], (numbers[:, t] == next_number) & by_turn
        reward = token_level_rewards[:, t] + pending
        delta = reward + torch.where(within, one, step) * next_value - values[:, t]
        advantage = delta + torch.where(within, one, trace) * next_advantage
        advantages[:, t] = torch.where(m, advantage, 0.0)
        pending = torch.where(m, 0.0, reward)
        next_value = torch.where(m, values[:, t], next_value)
        next_advantage = torch.where(m, advantage, next_advantage)
        next_number = torch.where(m, numbers[:, t], next_number)
    returns = torch.where(mask, advantages + values, 0.0)
    return (whiten_masked(advantages, mask) if whiten else advantages), returns


def reinforce_plus_plus(
    *, token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): discounted returns, whitened over the batch's sampled tokens."""
    returns = discount(token_level_rewards, response_mask, gamma)
    return whiten_masked(returns, response_mask), returns


def remax(*, token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv 2310.10505): the return minus the reward of a greedy rollout of the same prompt, (batch,)."""
    returns = discount(token_level_rewards, response_mask, 1.0)
    return returns - spread(reward_baselines, response_mask), returns


def optimal_token_baseline(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIds,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    handle_zero_tail: bool = True,
    singleton_advantage: Singleton = "zero",
) -> tuple[Tensor, Tensor]:
    """The optimal token baseline: G_t − Σ W_t G_t / Σ W_t, with sums over the group's rollouts at their t-th sampled token.

    W_t = Σ_{j ≤ t} (1 − 2 π_j + Σ π²) is the accumulated squared norm of the score function: rollouts with larger gradients
    count more. Where only one rollout is long enough, its baseline is 0 with `handle_zero_tail`, else its own return.

    Args:
        old_log_probs: (batch, response_len) of the policy that rolled out.
        sum_pi_squared: (batch, response_len) the sum of that policy's squared probabilities over the vocabulary.
    """
    mask = response_mask > 0
    returns = discount(token_level_rewards, mask, 1.0)
    norms = torch.where(mask, 1 - 2 * old_log_probs.exp() + sum_pi_squared, 0.0).clamp(min=0)
    weights = norms.cumsum(dim=1) + 1e-8  # if the policy is deterministic, the baseline becomes the plain mean
    places = mask.cumsum(dim=1) - 1
    advantages = torch.zeros_like(returns)
    for members in group_rows(index, mask.any(dim=1)):
        sampled = torch.zeros_like(mask).index_put((torch.tensor(members),), mask[members])
        g, w, t = returns[sampled], weights[sampled], places[sampled]
        if len(members) == 1:
            advantages[sampled] = g if singleton_advantage == "raw" else 0.0
        elif not equal_scores(g):
            baselines = torch.bincount(t, w * g) / torch.bincount(t, w)
            if handle_zero_tail:
                baselines[torch.bincount(t) == 1] = 0.0
            advantages[sampled] = g - baselines[t]
    return advantages, returns


def discount(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """(batch, response_len) G_t = r_t + γ G_{t+1} along the sampled tokens, 0 elsewhere."""
    mask = response_mask > 0
    returns = torch.zeros_like(rewards)
    following, pending = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        m, reward = mask[:, t], rewards[:, t] + pending
        found = reward + gamma * following
        returns[:, t] = torch.where(m, found, 0.0)
        following, pending = torch.where(m, found, following), torch.where(m, 0.0, reward)
    return returns
