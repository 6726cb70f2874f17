"""Advantage estimators against plain-Python references that never see a masked token."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms import compute_advantage
from etude.errors import ConfigError

F64 = torch.float64


def random_case(seed, rows=7, width=9):
    """Rewards, values and a ragged mask with gaps; the last row is padding."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(rows, width, generator=generator, dtype=F64)
    values = torch.randn(rows, width, generator=generator, dtype=F64)
    mask = (torch.rand(rows, width, generator=generator) < 0.6).long()
    mask[:, 0] = 1
    mask[-1] = 0
    return rewards, values, mask


def grpo_reference(rewards, mask, index, by_std):
    scores = [math.fsum(row) for row in rewards.tolist()]
    valid = [any(row) for row in mask.tolist()]
    expected = []
    for i, row in enumerate(mask.tolist()):
        group = [scores[j] for j in range(len(scores)) if index[j] == index[i] and valid[j]]
        value = 0.0
        if valid[i] and len(group) > 1:
            value = scores[i] - statistics.fmean(group)
            value /= (statistics.stdev(group) + 1e-6) if by_std else 1.0
        expected.append([value * m for m in row])
    return torch.tensor(expected, dtype=F64)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_grpo_is_the_formula_on_ragged_groups(by_std, seed):
    rewards, _, mask = random_case(seed)
    index = ["a", "b", "a", "a", "b", "alone", "a"]
    advantages, returns = compute_advantage(
        "grpo", token_level_rewards=rewards, response_mask=mask, index=index, norm_adv_by_std_in_grpo=by_std
    )
    expected = grpo_reference(rewards, mask, index, by_std)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(advantages, returns)
    assert not advantages[5].any()  # a group of one


@pytest.mark.parametrize("name", ["grpo", "gae"])
@pytest.mark.parametrize("junk", [7.0, math.inf, math.nan])
def test_padding_rows_change_nothing(name, junk):
    rewards, values, mask = random_case(3)
    index = [0, 1, 0, 0, 1, 1, 0]

    def run(rows):
        return compute_advantage(
            name,
            token_level_rewards=rewards[:rows],
            response_mask=mask[:rows],
            index=index[:rows],
            values=values[:rows],
            gamma=0.9,
            lam=0.8,
        )

    rewards[-1], values[-1] = junk, junk
    for padded, plain in zip(run(7), run(6)):
        assert torch.equal(padded[:6], plain)
        assert not padded[6].any()


def test_equal_scores_are_no_reason_to_move():
    rewards = torch.full((3, 1), 0.1)  # the float32 mean of three of these is not 0.1
    for by_std in (True, False):
        advantages, _ = compute_advantage(
            "grpo",
            token_level_rewards=rewards,
            response_mask=torch.ones(3, 1),
            index=[0, 0, 0],
            norm_adv_by_std_in_grpo=by_std,
        )
        assert torch.equal(advantages, torch.zeros(3, 1))


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([0, 0, 1, 1]),
        np.array([0, 0, 1, 1]),
        np.array(["x", "x", "y", "y"], dtype=object),
        [("q", 1), ("q", 1), ("q", 2), ("q", 2)],
    ],
)
def test_group_ids_are_any_hashable_things(index):
    rewards = torch.tensor([[1.0], [3.0], [10.0], [20.0]])
    advantages, _ = compute_advantage(
        "grpo", token_level_rewards=rewards, response_mask=torch.ones(4, 1), index=index, norm_adv_by_std_in_grpo=False
    )
    assert advantages.flatten().tolist() == [-1.0, 1.0, -5.0, 5.0]
    assert advantages.dtype == torch.float32


@given(st.integers(0, 2**31), st.randoms())
def test_grpo_does_not_depend_on_row_order_and_sums_to_zero(seed, rng):
    rewards, _, mask = random_case(seed)
    index = [rng.randrange(3) for _ in range(7)]
    order = list(range(7))
    rng.shuffle(order)

    def run(rows):
        return compute_advantage(
            "grpo", token_level_rewards=rewards[rows], response_mask=mask[rows], index=[index[i] for i in rows]
        )[0]

    straight = run(list(range(7)))
    torch.testing.assert_close(run(order), straight[order], rtol=1e-9, atol=1e-12)
    for group in set(index):
        members = [i for i in range(6) if index[i] == group]
        assert abs(float(straight[members, 0].sum())) < 1e-9  # column 0 is sampled in every row but the padding


def gae_reference(rewards, values, gamma, lam):
    """Equation 16 of arXiv 1506.02438 as its definition: A_t = Σ_l (γλ)^l δ_{t+l}, on a sequence without gaps."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, after)]
    return [
        math.fsum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_gae_with_gaps_is_gae_with_the_gaps_cut_out(gamma, lam, seed):
    rewards, values, mask = random_case(seed)
    rewards = rewards * mask
    rewards[2, mask[2].nonzero()[-1] + 1 :] = 0.25  # paid on masked tokens after the last sampled one
    advantages, returns = compute_advantage(
        "gae",
        token_level_rewards=rewards,
        response_mask=mask,
        values=values,
        gamma=gamma,
        lam=lam,
        whiten=False,
    )
    for i in range(len(mask)):
        kept = mask[i].nonzero().flatten()
        assert not advantages[i][mask[i] == 0].any()
        assert not returns[i][mask[i] == 0].any()
        if len(kept):
            paid = rewards[i, kept].tolist()
            paid[-1] += float(rewards[i, kept[-1] + 1 :].sum())
            expected = torch.tensor(gae_reference(paid, values[i, kept].tolist(), gamma, lam), dtype=F64)
            torch.testing.assert_close(advantages[i, kept], expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(returns[i, kept], expected + values[i, kept], rtol=1e-12, atol=1e-12)


def test_a_reward_inside_a_gap_counts_at_the_token_before_it():
    advantages, _ = compute_advantage(
        "gae",
        token_level_rewards=torch.tensor([[0.0, 2.0, 3.0, 0.0]]),
        response_mask=torch.tensor([[1, 0, 0, 1]]),
        values=torch.zeros(1, 4),
        gamma=0.5,
        whiten=False,
    )
    assert advantages.tolist() == [[5.0, 0.0, 0.0, 0.0]]


def test_gae_whitens_over_the_sampled_tokens_but_not_the_returns():
    rewards, values, mask = random_case(0)
    plain, returns = compute_advantage(
        "gae", token_level_rewards=rewards, response_mask=mask, values=values, whiten=False
    )
    white, same_returns = compute_advantage("gae", token_level_rewards=rewards, response_mask=mask, values=values)
    kept = plain[mask > 0].tolist()
    mean, spread = statistics.fmean(kept), math.sqrt(statistics.variance(kept) + 1e-8)
    expected = torch.tensor([(x - mean) / spread for x in kept], dtype=F64)
    torch.testing.assert_close(white[mask > 0], expected, rtol=1e-12, atol=1e-12)
    assert not white[mask == 0].any()
    assert torch.equal(returns, same_returns)


@pytest.mark.parametrize("junk", [5.0, math.inf, -math.inf, math.nan])
def test_masked_values_reach_no_advantage_and_no_return(junk):
    rewards, values, mask = random_case(1)
    changed = torch.where(mask > 0, values, junk)
    for before, after in zip(
        *(
            compute_advantage("gae", token_level_rewards=rewards, response_mask=mask, values=v)
            for v in (values, changed)
        )
    ):
        assert torch.equal(before, after)


def test_missing_arguments_and_names_are_said():
    ones = torch.ones(2, 3)
    with pytest.raises(ConfigError, match="group ids"):
        compute_advantage("grpo", token_level_rewards=ones, response_mask=ones)
    with pytest.raises(ConfigError, match="critic"):
        compute_advantage("gae", token_level_rewards=ones, response_mask=ones)
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        compute_advantage("grop", token_level_rewards=ones, response_mask=ones)
    with pytest.raises(ValueError):
        compute_advantage("grpo", token_level_rewards=ones, response_mask=ones, index=[0])
