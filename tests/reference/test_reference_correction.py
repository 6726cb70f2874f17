"""The corrections as tensors against the plain ones token by token, and what must not change them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.algorithms import (
    center_scores,
    importance_weights,
    off_policy_sequence_mask,
    rejection_mask,
    rollout_mismatch,
)
from etude.algorithms.distillation import ABSENT
from etude.metrics import add_metrics, finish_metrics
from etude.options import RolloutCorrectionOptions
from etude.plain.correction import centre, mismatch, off_policy_kept, reject, score_weight, sequences_of, weigh

F64 = torch.float64
CRITERIA = [
    ("token_k1", "0.7_1.3"),
    ("token_k2", "0.05"),
    ("token_k3", "0.02"),
    ("seq_sum_k1", "0.7_1.3"),
    ("seq_sum_k2", "0.3"),
    ("seq_sum_k3", "0.2"),
    ("seq_mean_k1", "0.9_1.1"),
    ("seq_mean_k2", "0.05"),
    ("seq_mean_k3", "0.04"),
    ("seq_max_k2", "0.2"),
    ("seq_max_k3", "0.1"),
    ("seq_mean_k1,token_k3", "0.8_1.2,0.03"),
]
WEIGHTS = [(level, bounds) for level in ("token", "sequence") for bounds in ("1.2", "0.8_1.5")]


class Row:
    """A row for the plain functions: its rollout, and the columns of its sampled tokens."""

    def __init__(self, rollout, *columns):
        self.rollout = rollout
        self.current, self.engine, self.advantages = columns

    def __len__(self):
        return len(self.current)


@st.composite
def batches(draw):
    """(log-probs, the engine's, advantages, mask, number of each row's rollout)."""
    rows, width, seed = draw(st.integers(1, 6)), draw(st.integers(1, 7)), draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[draw(st.integers(0, rows - 1)), 0] = True
    engine = -3 * torch.rand(rows, width, generator=generator, dtype=F64)
    policy = engine + draw(st.sampled_from([0.01, 0.3, 3.0])) * torch.randn(rows, width, generator=generator, dtype=F64)
    advantages = torch.randn(rows, width, generator=generator, dtype=F64)
    rollout = torch.randint(0, 3, (rows,), generator=generator)
    return policy, engine, advantages, mask.long(), rollout


def plain_rows(policy, engine, advantages, mask, rollout):
    names = {number: object() for number in rollout.tolist()}
    flags = mask.bool()
    found = [
        Row(names[int(rollout[r])], *(column[r][flags[r]] for column in (policy, engine, advantages)))
        for r in range(len(mask))
    ]
    return [row for row in found if len(row)]


def flat(values, rows):
    return [value for row in rows for value in values[row]]


def close(theirs, ours):
    theirs = finish_metrics(theirs)
    assert theirs.keys() == ours.keys()
    for name, value in ours.items():
        assert theirs[name] == pytest.approx(float(value), rel=1e-9, abs=1e-9), name


@given(batches(), st.sampled_from(WEIGHTS), st.booleans(), st.booleans())
def test_weights_are_the_plain_ones(batch, chosen, normalize, together):
    policy, engine, _, mask, rollout = batch
    rows = plain_rows(*batch)
    level, bounds = chosen
    options = {"rollout_is": level, "rollout_is_threshold": bounds, "rollout_is_batch_normalize": normalize}
    plain, figures = weigh(
        sequences_of(rows, together), {row: (row.current - row.engine).tolist() for row in rows}, options
    )
    weights, metrics = importance_weights(
        policy - engine,
        mask,
        level=level,
        bounds=RolloutCorrectionOptions(**options).is_bounds,
        batch_normalize=normalize,
        rollout=rollout if together else None,
    )
    assert weights[mask.bool()].tolist() == pytest.approx(flat(plain, rows), rel=1e-9)
    assert not weights[mask == 0].any()
    close(metrics, figures)


@given(batches(), st.sampled_from(CRITERIA), st.booleans())
def test_rejection_is_the_plain_one(batch, chosen, together):
    policy, engine, _, mask, rollout = batch
    rows = plain_rows(*batch)
    options = {"rollout_rs": chosen[0], "rollout_rs_threshold": chosen[1]}
    plain, figures = reject(
        sequences_of(rows, together), {row: (row.current - row.engine).tolist() for row in rows}, options
    )
    criteria = RolloutCorrectionOptions(**options).criteria
    kept, metrics = rejection_mask(policy - engine, mask, criteria, rollout if together else None)
    assert kept[mask.bool()].tolist() == flat(plain, rows)
    assert not kept[mask == 0].any()
    close(metrics, figures)


@given(batches())
def test_the_measures_are_the_plain_ones(batch):
    policy, engine, _, mask, _ = batch
    close(rollout_mismatch(policy, engine, mask), mismatch(plain_rows(*batch)))


@given(batches(), st.sampled_from([1e-3, 0.2]))
def test_the_off_policy_mask_is_the_plain_one(batch, threshold):
    policy, engine, advantages, mask, _ = batch
    kept, _ = off_policy_sequence_mask(policy, engine, advantages, mask, threshold)
    plain = [off_policy_kept(row.current, row, threshold) for row in plain_rows(*batch)]
    assert kept[mask.bool()].tolist() == [value for values in plain for value in values]


@given(st.integers(0, 2**31), st.integers(2, 9), st.sampled_from([None, "1.1", "0.8_1.5"]))
@settings(max_examples=30)
def test_centred_scores_are_the_plain_ones_and_leave_no_drift(seed, size, bounds):
    """At a constant advantage nothing is learned: the centred score is 0 on average over the engine's tokens, whose tail is
    taken to be the policy's. The head has `size` of 9 tokens, in one place fewer."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 3, 9, generator=generator, dtype=F64, requires_grad=True)
    ours = logits.log_softmax(-1)
    engine = (logits.detach() + 0.5 * torch.randn(1, 3, 9, generator=generator, dtype=F64)).log_softmax(-1)
    head, ids = engine.topk(size)
    head[0, 1, -1], mask = ABSENT, torch.tensor([[1, 1, 0]])
    options = {"rollout_is": bounds and "token", "rollout_is_threshold": bounds or "2.0"}
    limits = RolloutCorrectionOptions(**options).is_bounds if bounds else None
    terms, figures = center_scores(ours.gather(-1, ids), head, mask, limits)
    left = [[(i, q) for i, q in zip(ids[0, t].tolist(), head[0, t].tolist()) if q > -1e9] for t in range(2)]
    plain, sizes = centre(ours[0, :2], [tuple(map(list, zip(*each))) for each in left], options)
    torch.testing.assert_close(terms[0, :2], plain, rtol=1e-9, atol=1e-12)
    assert not terms[0, 2:].any()
    close(figures, {f"rollout_corr/{name}": sum(values) / 2 for name, values in sizes.items()})
    for place, pairs in enumerate(left):
        p, inside = ours[0, place].detach().exp(), torch.zeros(9, dtype=torch.bool)
        inside[[i for i, _ in pairs]] = True
        q = engine[0, place].exp()
        tail = (1 - q[inside].sum()).clamp(min=1e-6) / (1 - p[inside].sum()).clamp(min=1e-6)
        q = torch.where(inside, q, tail * p)
        score = torch.autograd.grad(
            (q * torch.tensor([score_weight(float(r), options) for r in p / q]) * ours[0, place]).sum()
            - terms[0, place],
            logits,
            retain_graph=True,
        )[0]
        torch.testing.assert_close(score, torch.zeros_like(score), rtol=0, atol=1e-7)


# -- invariances -------------------------------------------------------------------------------------------------

LEVELS = [("weights", *chosen) for chosen in WEIGHTS] + [("kept", *chosen) for chosen in CRITERIA]


def corrected(kind, names, bounds, policy, engine, mask, rollout):
    if kind == "weights":
        options = RolloutCorrectionOptions(rollout_is=names, rollout_is_threshold=bounds)
        return importance_weights(
            policy - engine, mask, level=names, bounds=options.is_bounds, batch_normalize=True, rollout=rollout
        )
    criteria = RolloutCorrectionOptions(rollout_rs=names, rollout_rs_threshold=bounds).criteria
    return rejection_mask(policy - engine, mask, criteria, rollout)


@given(batches(), st.sampled_from(LEVELS), st.integers(0, 100))
def test_order_padding_and_what_is_masked_change_nothing(batch, chosen, seed):
    policy, engine, _, mask, rollout = batch
    made, metrics = corrected(*chosen, policy, engine, mask, rollout)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    turned, same = corrected(*chosen, policy[order], engine[order], mask[order], rollout[order])
    torch.testing.assert_close(turned, made[order], rtol=1e-12, atol=0)
    close(same, finish_metrics(metrics))
    junk = torch.where(mask == 0, torch.nan, policy)
    wider = [torch.nn.functional.pad(column, (0, 2)) for column in (junk, engine, mask)]
    rows = [torch.cat([column, column.new_zeros(1, column.shape[1])]) for column in wider]
    padded, same = corrected(*chosen, *rows, torch.cat([rollout, torch.tensor([99])]))
    torch.testing.assert_close(padded[:-1, : mask.shape[1]], made, rtol=1e-12, atol=0)
    close(same, finish_metrics(metrics))


@given(batches(), st.sampled_from(LEVELS))
def test_a_rollout_may_be_split_into_more_rows(batch, chosen):
    """Every row becomes two, which hold its even and its odd places."""
    policy, engine, _, mask, rollout = batch
    made, metrics = corrected(*chosen, policy, engine, mask, rollout)
    even = (torch.arange(mask.shape[1]) % 2 == 0).long()
    halves = torch.cat([mask * even, mask * (1 - even)])
    split, same = corrected(*chosen, policy.repeat(2, 1), engine.repeat(2, 1), halves, rollout.repeat(2))
    torch.testing.assert_close(split[: len(mask)] + split[len(mask) :], made, rtol=1e-12, atol=0)
    close(same, finish_metrics(metrics))


@given(batches(), st.integers(1, 4))
def test_ranks_and_micro_batches_add_up_to_the_same_figures(batch, parts):
    policy, engine, advantages, mask, _ = batch
    whole = (rollout_mismatch(policy, engine, mask), off_policy_sequence_mask(policy, engine, advantages, mask, 0.1)[1])
    cuts = [slice(part, None, parts) for part in range(parts)]
    measured = add_metrics(rollout_mismatch(policy[cut], engine[cut], mask[cut]) for cut in cuts)
    masked = add_metrics(
        off_policy_sequence_mask(policy[cut], engine[cut], advantages[cut], mask[cut], 0.1)[1] for cut in cuts
    )
    close(measured, finish_metrics(whole[0]))
    close(masked, finish_metrics(whole[1]))
