"""From a loss a token to one number: references by loops, and invariance to how a mini-batch is cut."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms import LOSS_AGG_MODES, agg_loss, masked_mean
from etude.errors import ConfigError

F64 = torch.float64
LOSSES = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 128.0, 256.0]], dtype=F64)
MASK = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "scaling", "expected"),
    [
        ("token-mean", {}, (1 + 4 + 16) / 3),
        ("token-sum", {}, 21),
        ("seq-mean-token-sum", {}, (5 + 16) / 2),
        ("seq-mean-token-sum-norm", {}, (5 + 16) / 2 / 3),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": 10.0}, (5 + 16) / 2 / 10),
        ("seq-mean-token-mean", {}, (2.5 + 16) / 2),
        ("token-mean", {"batch_num_tokens": 7.0}, 21 / 7),
        ("seq-mean-token-mean", {"global_batch_size": 4.0, "dp_size": 2}, (2.5 + 16) / 4 * 2),
        ("token-sum", {"dp_size": 3}, 63),
        # the rows are two sequences of one rollout, which has a third, elsewhere, of two tokens
        ("seq-mean-token-mean", {"global_batch_size": 1.0, "rollout_tokens": torch.tensor([5, 5, 5])}, 21 / 5),
        ("seq-mean-token-sum", {"global_batch_size": 1.0, "rollout_tokens": torch.tensor([5, 5, 5])}, 21),
    ],
)
@pytest.mark.parametrize("mask", [MASK, MASK.bool(), MASK.float()])
def test_modes_by_hand(mode, scaling, expected, mask):
    assert float(agg_loss(LOSSES, mask, mode, **scaling)) == pytest.approx(expected, rel=1e-15)


@st.composite
def batches_and_cuts(draw):
    rows, width = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randn(rows, width, generator=generator, dtype=F64)
    mask = (torch.rand(rows, width, generator=generator) < 0.5).long()
    parts = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    return losses, mask, parts


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(batches_and_cuts())
def test_how_a_mini_batch_is_cut_does_not_matter(mode, case):
    losses, mask, parts = case
    losses.requires_grad_()
    whole = agg_loss(losses, mask, mode)
    scaling = {"batch_num_tokens": float(mask.sum()), "global_batch_size": float((mask.sum(1) > 0).sum())}
    rows = [[i for i, p in enumerate(parts) if p == part] for part in sorted(set(parts))]
    cut = sum(agg_loss(losses[chosen], mask[chosen], mode, **scaling) for chosen in rows)
    ranks = sum(agg_loss(losses[chosen], mask[chosen], mode, dp_size=len(rows), **scaling) for chosen in rows) / len(
        rows
    )
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ranks, whole, rtol=1e-12, atol=1e-12)
    (of_whole,) = torch.autograd.grad(whole, losses)
    (of_cut,) = torch.autograd.grad(cut, losses)
    torch.testing.assert_close(of_cut, of_whole, rtol=1e-12, atol=1e-12)
    assert not of_whole[mask == 0].any()


@pytest.mark.parametrize("junk", [1e30, math.inf, math.nan])
def test_masked_losses_count_for_nothing(junk):
    dirty = LOSSES.masked_fill(MASK == 0, junk)
    for mode in LOSS_AGG_MODES:
        assert torch.equal(agg_loss(dirty, MASK, mode), agg_loss(LOSSES, MASK, mode))
    assert torch.equal(masked_mean(dirty, MASK), masked_mean(LOSSES, MASK))
    assert float(masked_mean(LOSSES, MASK)) == 7
    assert float(masked_mean(dirty, torch.zeros_like(MASK))) == 0


def test_an_unknown_mode_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'token-mean'"):
        agg_loss(LOSSES, MASK, "token_mean")
