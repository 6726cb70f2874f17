"""DPO's loss against the paper's formula, and its gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms import preference_loss

NUMBERS = st.floats(-40, 40)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5), st.floats(0.01, 2))
def test_the_loss_is_the_papers_and_the_weights_are_its_gradient(pairs, beta):
    """Rafailov et al. 2023, equation 7: −log σ(β log π(y_w)/π_ref(y_w) − β log π(y_l)/π_ref(y_l))."""
    chosen, rejected = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
    chosen.requires_grad_()
    rejected.requires_grad_()
    losses, weights = preference_loss(chosen, rejected, beta)
    for loss, (better, worse) in zip(losses.tolist(), pairs):
        assert loss == pytest.approx(math.log1p(math.exp(-(beta * better - beta * worse))), rel=1e-12, abs=1e-300)
    losses.sum().backward()
    torch.testing.assert_close(chosen.grad, -weights.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(rejected.grad, weights.detach(), rtol=1e-12, atol=0)


def test_at_the_reference_every_pair_costs_log_two():
    losses, weights = preference_loss(torch.zeros(3), torch.zeros(3), 0.5)
    assert losses.tolist() == pytest.approx([math.log(2)] * 3)
    assert weights.tolist() == [0.25] * 3
