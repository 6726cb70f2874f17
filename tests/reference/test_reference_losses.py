"""Every policy loss against its paper's formula, and against itself on the same tokens in another order, cut into
micro-batches and ranks, with padding, and with rollouts split into more sequences."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms import LOSS_AGG_MODES, POLICY_LOSSES, policy_loss
from etude.plain.losses import LOSSES, OWN, SELECTING, plain_policy_loss, select, token_weights

F64 = torch.float64
# Options under which each is met by random tokens; the others' own defaults are.
OPTIONS = {
    "vanilla": {"clip_ratio_high": 0.3, "clip_ratio_c": 1.4},
    "gspo": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
    "cispo": {"clip_ratio": 0.3},
    "dppo_tv": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1.5},
    "dppo_kl": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 1.5},
    "clip_cov": {"clip_ratio": 0.3, "clip_cov_ratio": 0.3, "clip_cov_lb": 0.01, "clip_cov_ub": 2.0},
    "kl_cov": {"kl_cov_ratio": 0.3},
    "dro": {"dro_beta": 0.7},
}
OF_SEQUENCES = ("gspo", "luspo", "geo_mean", "vespo")  # with a ratio of the whole sequence
COLUMNS = ("old_log_prob", "log_prob", "advantages", "response_mask")


ROLLOUTS = [object() for _ in range(8)]


class PlainRow(SimpleNamespace):
    """What the plain losses know of a sequence."""

    def __len__(self):
        return len(self.old)


def batch(rows, width, seed, *, one_advantage=False):
    """Random columns; `rollout` (rows,) numbers the rollouts, some of which have several rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=F64)

    old = -0.05 - normal(rows, width).abs()
    advantages = normal(rows, 1).expand(rows, width).clone() if one_advantage else normal(rows, width)
    mask = (torch.rand(rows, width, generator=generator) < 0.7).long()
    mask[0, 0] = 1
    return {
        "old_log_prob": old,
        "log_prob": (old + 0.5 * normal(rows, width)).clamp(max=-0.01),
        "advantages": advantages,
        "response_mask": mask,
        "rollout": (torch.rand(rows, generator=generator) < 0.6).long().cumsum(0),
    }


def counts(case):
    """What the trainer sends of a whole mini-batch."""
    tokens = case["response_mask"].sum(1)
    of_rollouts = torch.zeros(int(case["rollout"].max()) + 1, dtype=torch.long).index_add(0, case["rollout"], tokens)
    return {
        "batch_num_tokens": float(tokens.sum()),
        "global_batch_size": float((of_rollouts > 0).sum()),
        "rollout_tokens": of_rollouts[case["rollout"]],
        "loss_scale_factor": 9.0,
    }


def selection(name, case):
    columns = {key: case[key] for key in ("advantages", "response_mask")}
    made = POLICY_LOSSES.get(name).select_tokens(old_log_probs=case["old_log_prob"], **columns, **OPTIONS.get(name, {}))
    return {} if made is None else {"selected_tokens": made}


def of_rows(per_row, rows):
    return {key: value[rows] if isinstance(value, torch.Tensor) else value for key, value in per_row.items()}


def compute(name, case, mode=None, **more):
    """(loss, gradient of log π, metrics)."""
    log_prob = case["log_prob"].clone().requires_grad_()
    columns = {key: case[key] for key in COLUMNS} | {"log_prob": log_prob}
    loss, metrics = policy_loss(name, **columns, loss_agg_mode=mode, **OPTIONS.get(name, {}), **more)
    loss.backward()
    return loss.detach(), log_prob.grad, metrics


def assert_same(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(one[1], other[1], rtol=1e-10, atol=1e-12)


def actor_of(name):
    options = {"loss_mode": name, "loss_kwargs": {}} | OPTIONS.get(name, {})
    bounds = dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high")) | OPTIONS.get(name, {})
    return {**bounds, "loss_agg_mode": None, "policy_loss": options}


cases = st.builds(batch, st.integers(1, 6), st.integers(1, 7), st.integers(0, 2**31))
modes = st.sampled_from([None, *LOSS_AGG_MODES])


def test_every_loss_has_a_plain_one_with_its_defaults():
    assert OWN.keys() == LOSSES.keys() == POLICY_LOSSES.built_in.keys()
    for name, (mode, bounds, options) in OWN.items():
        record = POLICY_LOSSES.get(name)
        assert record.loss_agg_mode == mode
        own = dict(zip(("clip_ratio_low", "clip_ratio_high"), bounds or ())) | options
        assert {key: value or 0 for key, value in record.defaults.items()} == own  # dro's has none


@pytest.mark.parametrize("name", LOSSES)
@given(cases, modes, st.booleans())
def test_a_loss_is_its_papers_formula(name, case, mode, weighted):
    actor, whole = actor_of(name), counts(case)
    weights = 0.5 + torch.rand(case["log_prob"].shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    given_weights = {"rollout_is_weights": weights} if weighted and name != "vespo" else {}
    ours = compute(name, case, mode, **whole, **selection(name, case), **given_weights)
    log_prob, rows = case["log_prob"].clone().requires_grad_(), []
    for number, mask in enumerate(case["response_mask"].bool()):
        row = PlainRow(
            rollout=ROLLOUTS[int(case["rollout"][number])],
            old=case["old_log_prob"][number][mask],
            advantages=case["advantages"][number][mask],
            log_probs=log_prob[number][mask],
            weights=weights[number][mask] if given_weights else 1.0,
        )
        rows += [row] if len(row) else []
    select(actor, rows)
    loss, flags = torch.zeros((), dtype=F64), {}
    for row, weight in zip(rows, token_weights(mode or OWN[name][0], rows, 9.0)):
        losses, flagged = plain_policy_loss(actor, row.log_probs, row)
        loss = loss + weight * (losses * row.weights).sum()
        for key, value in flagged.items():
            flags.setdefault(f"actor/{key}", []).append(value.double())
    loss.backward()
    assert_same(ours, (loss.detach(), log_prob.grad))
    distance = torch.cat([row.old - row.log_probs.detach() for row in rows])
    found = {key: float(torch.cat(value).mean()) for key, value in flags.items()} | {
        "actor/ppo_kl": float(distance.mean())
    }
    assert ours[2] == pytest.approx(found, rel=1e-10, abs=1e-12)


def test_random_tokens_meet_every_bound():
    """A guard for the test above."""
    case = batch(60, 7, 0)
    for name in LOSSES:
        metrics = compute(name, case, **counts(case), **selection(name, case))[2]
        assert all(0.005 < share < 0.9 for key, share in metrics.items() if "clipfrac" in key), (name, metrics)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("cispo", "dppo_tv", "dppo_kl", "vespo")])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_gradient_is_the_slope(name, mode):
    """Of all but those whose weights are constants by definition: their gradients are the formula's, above. One advantage a
    sequence, for which GSPO's gradient per token is that of its objective."""
    case = batch(4, 6, 3, one_advantage=True)
    chosen = selection(name, case)

    def loss_of(log_prob):
        columns = {key: case[key] for key in COLUMNS} | {"log_prob": log_prob}
        return policy_loss(name, **columns, loss_agg_mode=mode, **OPTIONS.get(name, {}), **chosen)[0]

    if name in (
        "gspo",
        "luspo",
    ):  # the gradient of π / sg(π) is hidden from differences: those of the sequence's ratio are
        slopes = slopes_of(loss_of, case["log_prob"])
        torch.testing.assert_close(compute(name, case, mode)[1], slopes, rtol=1e-6, atol=1e-8)
    else:
        assert torch.autograd.gradcheck(loss_of, case["log_prob"].clone().requires_grad_(), eps=1e-6, atol=1e-7)


def slopes_of(function, x, step=1e-6):
    found = torch.zeros_like(x)
    for place in range(x.numel()):
        shift = torch.zeros(x.numel(), dtype=F64)
        shift[place] = step
        shift = shift.view_as(x)
        found.view(-1)[place] = float(function(x + shift) - function(x - shift)) / (2 * step)
    return found


@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "dppo_kl", "vespo", "reinforce"])
def test_a_weighted_log_prob_is_linear_in_log_probs(name):
    """The loss is Σ gradient · log π: the weights have no gradient."""
    case = batch(5, 6, 4)
    loss, gradient, _ = compute(name, case)
    torch.testing.assert_close((gradient * case["log_prob"]).sum(), loss)


# -- the same tokens otherwise --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@given(cases, modes, st.randoms(use_true_random=False))
def test_order_and_cuts_do_not_matter(name, case, mode, dice):
    rows = len(case["response_mask"])
    whole = counts(case) | selection(name, case)
    expected = compute(name, case, mode, **whole)
    order = dice.sample(range(rows), rows)
    loss, gradient, _ = compute(name, of_rows(case, order), mode, **of_rows(whole, order))
    assert_same((loss, gradient), (expected[0], expected[1][order]))
    part = [dice.randrange(3) for _ in range(rows)]
    parts = [[row for row in range(rows) if part[row] == number] for number in sorted(set(part))]
    for ranks in (1, len(parts)):  # micro-batches of one rank, whose gradients add up, or one a rank
        scale = {} if ranks == 1 else {"dp_size": ranks}
        losses, gradient = 0.0, torch.zeros_like(expected[1])
        for chosen_rows in parts:
            made = compute(name, of_rows(case, chosen_rows), mode, **of_rows(whole, chosen_rows), **scale)
            losses, gradient[chosen_rows] = losses + made[0] / ranks, made[1] / ranks
        assert_same((losses, gradient), expected)


@pytest.mark.parametrize("name", LOSSES)
@given(cases, modes, st.integers(1, 3), st.integers(0, 2))
def test_padding_does_not_matter(name, case, mode, more_rows, more_columns):
    expected = compute(name, case, mode, **counts(case))
    padded = {
        key: torch.nn.functional.pad(case[key], (0, more_columns, 0, more_rows), value=0 if "mask" in key else math.nan)
        for key in COLUMNS
    }
    padded["rollout"] = torch.nn.functional.pad(case["rollout"], (0, more_rows), value=int(case["rollout"].max()) + 1)
    rows, width = case["log_prob"].shape
    loss, gradient, metrics = compute(name, padded, mode, **counts(padded))
    assert_same((loss, gradient[:rows, :width]), expected)
    assert metrics == pytest.approx(expected[2])
    assert not gradient[rows:].any()
    assert not gradient[:, width:].any()


@pytest.mark.parametrize("name", LOSSES)
@given(cases, modes, st.randoms(use_true_random=False))
def test_a_rollout_split_into_more_sequences_keeps_its_weight(name, case, mode, dice):
    """The loss stays what it is, token by token. A sequence's ratio is another for another sequence: there it does so where
    ratios are 1, and advantages one a rollout."""
    if name in OF_SEQUENCES:
        one = case["advantages"][:, :1].expand_as(case["advantages"])
        case = case | {"log_prob": case["old_log_prob"].clone(), "advantages": one.clone()}
    expected = compute(name, case, mode, **counts(case))
    width, pieces = case["log_prob"].shape[1], []
    for row in range(len(case["response_mask"])):
        cut = dice.randint(0, width)
        first = torch.arange(width) < cut
        pieces += [(row, first), (row, ~first)]
    rows = [row for row, _ in pieces]
    split = of_rows(case, rows)
    split["response_mask"] = torch.stack([case["response_mask"][row] * kept for row, kept in pieces])
    loss, gradient, metrics = compute(name, split, mode, **counts(split))
    joined = torch.zeros_like(expected[1]).index_add(0, torch.tensor(rows), gradient)
    assert_same((loss, joined), expected)
    assert metrics == pytest.approx(expected[2], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("junk", [1e30, -math.inf, math.nan])
@pytest.mark.parametrize("column", ["old_log_prob", "log_prob", "advantages", "rollout_is_weights"])
def test_nothing_masked_reaches_a_loss(name, junk, column):
    case = batch(5, 6, 5) | {"rollout_is_weights": torch.full((5, 6), 0.9, dtype=F64)}
    case["response_mask"][-1] = 0

    def run(columns):
        return compute(name, columns, rollout_is_weights=columns["rollout_is_weights"])

    expected = run(case)
    found = run(case | {column: case[column].masked_fill(case["response_mask"] == 0, junk)})
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2] == expected[2]


def test_vespo_has_the_correction_in_the_sequences_ratio():
    case, weights = batch(5, 6, 6), 0.5 + torch.rand(5, 6, dtype=F64)
    corrected = compute("vespo", case, rollout_is_weights=weights)
    further = case | {"old_log_prob": case["old_log_prob"] - weights.log()}
    assert_same(corrected, compute("vespo", further))


def test_vespo_leaves_out_the_tokens_whose_weight_is_0():
    """Of the loss and of the sequence's ratio; they still count in the divisors."""
    case = batch(5, 6, 6)
    out = torch.rand(5, 6, generator=torch.Generator().manual_seed(2)) < 0.4
    corrected = compute("vespo", case, rollout_is_weights=torch.where(out, 0.0, 0.5).double())
    old = torch.where(out, case["log_prob"], case["old_log_prob"] - math.log(0.5))
    rest = case | {"old_log_prob": old, "advantages": case["advantages"].masked_fill(out, 0.0)}
    assert bool((out & (case["response_mask"] > 0)).any(dim=1).sum() >= 3)
    assert_same(corrected, compute("vespo", rest))


@pytest.mark.parametrize("name", SELECTING)
def test_a_selection_is_a_share_of_the_whole_mini_batch(name):
    case = batch(40, 7, 7)
    chosen = selection(name, case)["selected_tokens"]
    tokens = int(case["response_mask"].sum())
    assert int(chosen.sum()) == int(0.3 * tokens)
    backwards = list(reversed(range(40)))
    assert torch.equal(selection(name, of_rows(case, backwards))["selected_tokens"], chosen[backwards])
    assert not chosen[case["response_mask"] == 0].any()
    mask = case["response_mask"].bool()
    old, advantages = (case[key] - case[key][mask].mean() for key in ("old_log_prob", "advantages"))
    covariance = old * advantages
    if name == "kl_cov":
        assert covariance[chosen > 0].min() >= covariance[mask & (chosen == 0)].max()
    else:
        assert ((covariance[chosen > 0] > 0.01) & (covariance[chosen > 0] < 2)).all()
