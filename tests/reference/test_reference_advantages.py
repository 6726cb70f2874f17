"""Every estimator against the plain formulas, and what may change nothing: the order of rows, columns of padding, holes in
the mask, the names of groups."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.algorithms import compute_advantage
from etude.plain.advantages import ESTIMATORS, Story, advantages, gae

F64 = torch.float64
NAMES = sorted(ESTIMATORS)
DEFAULTS = {
    "norm_adv_by_std_in_grpo": True,
    "singleton_advantage": "zero",
    "gamma": 1.0,
    "gdpo_reward_keys": ["one", "two"],
    "gdpo_reward_weights": [1.0, 0.3],
    "adv_estimator_kwargs": {},
}
READ = {  # of those, beside the first two
    "gdpo": ("gdpo_reward_keys", "gdpo_reward_weights"),
    "reinforce_plus_plus": ("gamma",),
    "turn_grpo": ("gamma",),
    "gigpo": ("gamma",),
}
NO_STD = ("rloo", "rloo_vectorized", "opo", "gpg", "max_rl", "reinforce_plus_plus_baseline")
UNGROUPED = ("rae", "reinforce_plus_plus", "remax")
OWN = {
    "gpg": {"f_norm": 2.0},
    "turn_grpo": {"step_advantage_w": 0.5},
    "gigpo": {"step_advantage_w": 0.7},
    "optimal_token_baseline": {"handle_zero_tail": False},
}


def options_of(name, drawn):
    options = {**DEFAULTS, **drawn, "adv_estimator": name, "adv_estimator_kwargs": OWN.get(name, {})}
    read = [*READ.get(name, ()), *([] if name in UNGROUPED else ["singleton_advantage"])]
    if name not in (*NO_STD, *UNGROUPED) and "baseline" not in name:
        read.append("norm_adv_by_std_in_grpo")
    return options, {key: options[key] for key in read} | options["adv_estimator_kwargs"]


def batch_of(seed):
    """Columns of ragged rows with holes, few scores, and turns that end in holes or without any."""
    dice = np.random.default_rng(seed)
    rows, width = 9, 12
    mask = torch.from_numpy((dice.random((rows, width)) < 0.7).astype(int))
    mask[torch.arange(width) >= torch.from_numpy(dice.integers(1, width + 1, rows))[:, None]] = 0
    mask[0, 0], mask[-1] = 1, 0  # the last row is padding
    last = width - 1 - mask.flip(1).argmax(1)
    rewards = torch.zeros(rows, width, dtype=F64)
    rewards[torch.arange(rows), last] = torch.from_numpy(dice.choice([0.0, 0.5, 1.25], rows))
    if seed % 2:
        rewards += torch.from_numpy(dice.choice([0.0, 0.0, 0.1, -0.3], (rows, width))) * mask
    log_probs = -torch.from_numpy(dice.random((rows, width)))
    squares = (2 * log_probs).exp() + (1 - log_probs.exp()) ** 2 * torch.from_numpy(dice.random((rows, width)))
    turns = torch.from_numpy(dice.random((rows, width)) < 0.3).long().cumsum(1)
    seen = torch.from_numpy(dice.integers(0, 2, (rows, width)))
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": dice.integers(0, 3, rows).tolist(),
        "old_log_probs": log_probs,
        "sum_pi_squared": squares,
        "reward_baselines": (greedy := torch.from_numpy(dice.random(rows))),
        "role_baselines": greedy,
        "reward_components": {name: torch.from_numpy(dice.choice([0.0, 0.5, 2.0], rows)) for name in ("one", "two")},
        "turns": turns,
        "observations": seen.gather(1, turns.clamp(max=width - 1)),  # one a turn
    }


def stories_of(batch):
    found = []
    for row, mask in enumerate(batch["response_mask"].bool()):

        def sampled(name, row=row, mask=mask):
            return batch[name][row][mask].tolist()

        norms = 1 - 2 * batch["old_log_probs"][row][mask].exp() + batch["sum_pi_squared"][row][mask]
        found.append(
            Story(
                str(batch["index"][row]),
                sampled("token_level_rewards"),
                sampled("turns"),
                sampled("observations"),
                norms.tolist(),
                float(batch["reward_baselines"][row]),
                {name: float(column[row]) for name, column in batch["reward_components"].items()},
            )
        )
    return found


def compute(name, batch, own):
    return compute_advantage(name, **batch, **own)


OPTIONS = st.fixed_dictionaries(
    {
        "norm_adv_by_std_in_grpo": st.booleans(),
        "singleton_advantage": st.sampled_from(["zero", "raw"]),
        "gamma": st.sampled_from([1.0, 0.9, 0.0]),
    }
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), drawn=OPTIONS)
def test_an_estimator_is_its_formula(name, seed, drawn):
    options, own = options_of(name, drawn)
    batch = batch_of(seed)
    found = compute(name, batch, own)
    valid = batch["response_mask"].any(1).tolist()
    expected = advantages([story for story, counts in zip(stories_of(batch), valid) if counts], options)
    for ours, theirs in zip(found, expected):
        rows = iter(theirs)
        for row, mask in enumerate(batch["response_mask"].bool()):
            plain = next(rows) if valid[row] else []
            torch.testing.assert_close(ours[row][mask], torch.tensor(plain, dtype=F64), rtol=1e-9, atol=1e-9)
            assert not ours[row][~mask].any()


@pytest.mark.parametrize("unit", ["token", "turn"])
@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.5, 0.0]))
def test_gae_is_its_formula_by_tokens_and_by_turns(unit, seed, gamma, lam):
    batch = batch_of(seed)
    values = torch.from_numpy(np.random.default_rng(seed).normal(size=batch["response_mask"].shape))
    options = {"gamma": gamma, "lam": lam, "gae_timestep_unit": unit}
    found, returns = compute_advantage("gae", **batch, values=values, **options, whiten=False)
    for row, mask in enumerate(batch["response_mask"].bool()):
        given_rewards, its_values = batch["token_level_rewards"][row][mask].tolist(), values[row][mask].tolist()
        expected = torch.tensor(gae(given_rewards, its_values, batch["turns"][row][mask].tolist(), options), dtype=F64)
        torch.testing.assert_close(found[row][mask], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(returns[row][mask], expected + values[row][mask], rtol=1e-9, atol=1e-9)
    if unit == "turn":  # one turn a row: no discount at all
        one = torch.zeros_like(batch["turns"])
        whole, _ = compute_advantage("gae", **{**batch, "turns": one}, values=values, **options, whiten=False)
        plain, _ = compute_advantage("gae", **batch, values=values, whiten=False)
        torch.testing.assert_close(whole, plain)


def rearranged(batch, change, of_rows):
    """`change` on every (rows, width) column, `of_rows` on the others."""
    return {
        key: {name: of_rows(part) for name, part in column.items()}
        if isinstance(column, dict)
        else of_rows(column)
        if isinstance(column, list) or column.dim() == 1
        else change(column)
        for key, column in batch.items()
    }


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), drawn=OPTIONS)
def test_what_may_change_nothing_changes_nothing(name, seed, drawn):
    _, own = options_of(name, drawn)
    batch = batch_of(seed)
    plain = compute(name, batch, own)
    dice = np.random.default_rng(seed)
    order = dice.permutation(len(plain[0])).tolist()

    def pick(column):
        return [column[row] for row in order] if isinstance(column, list) else column[order]

    for before, after in zip(plain, compute(name, rearranged(batch, pick, pick), own)):
        torch.testing.assert_close(after, before[order], rtol=1e-9, atol=1e-9)

    renamed = {**batch, "index": [("prompt", 7 - uid) for uid in batch["index"]]}
    for before, after in zip(plain, compute(name, renamed, own)):
        assert torch.equal(before, after)

    places = np.sort(dice.choice(17, 12, replace=False))  # masked columns between, before and after

    def holed(column, fill=0):
        wide = torch.full((len(column), 17), fill, dtype=column.dtype)
        wide[:, places] = column
        return wide

    holes = rearranged(batch, holed, lambda column: column)
    junk = torch.ones(17, dtype=torch.bool).index_fill(0, torch.from_numpy(places), False)
    for column in ("old_log_probs", "sum_pi_squared"):
        holes[column][:, junk] = torch.nan
    for before, after in zip(plain, compute(name, holes, own)):
        torch.testing.assert_close(after, holed(before), rtol=1e-9, atol=1e-9)

    fewer = rearranged(batch, lambda column: column[:-1], lambda column: column[:-1])  # without the padding row
    for before, after in zip(plain, compute(name, fewer, own)):
        torch.testing.assert_close(after, before[:-1], rtol=1e-12, atol=1e-12)


def test_a_group_of_one_has_no_advantage_unless_asked_for():
    batch = batch_of(4)
    batch["index"] = [*range(len(batch["index"]))]
    for name in set(NAMES) - set(UNGROUPED):
        for choice in ("zero", "raw"):
            _, own = options_of(name, {"singleton_advantage": choice})
            found, _ = compute(name, batch, own)
            assert bool(found.any()) == (choice == "raw"), name


def test_turns_default_to_the_runs_of_sampled_tokens():
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1]])
    rewards = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 1.0]])
    given = {"token_level_rewards": rewards, "response_mask": mask, "index": [0, 0], "gamma": 0.0}
    by_runs, _ = compute_advantage("turn_grpo", **given, norm_adv_by_std_in_grpo=False)
    assert by_runs.tolist() == [[-1.5, -1.5, 0.0, 0.0], [1.5, 0.0, 0.0, 0.0]]
    same, _ = compute_advantage(
        "turn_grpo", **given, norm_adv_by_std_in_grpo=False, turns=torch.tensor([[0, 0, 1, 1]] * 2)
    )
    assert torch.equal(by_runs, same)
