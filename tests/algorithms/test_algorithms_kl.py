"""KL penalties against their formulas, their expectations and their gradients; the coefficient against its recursion."""

import math

import pytest
import torch

from etude.algorithms import adapt_kl_coef, apply_kl_penalty, kl_penalty
from etude.errors import ConfigError

F64 = torch.float64
DIFFERENCES = [-30.0, -25.0, -3.0, -1.0, -1e-5, 0.0, 1e-5, 0.5, 2.0, 9.0, 12.0, 25.0]
FORMULAS = {
    "kl": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: max(-10.0, min(10.0, math.expm1(-max(-20.0, min(20.0, d))) + max(-20.0, min(20.0, d)))),
}
ALIASES = {"kl": "kl", "k1": "kl", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def penalty_and_slope(kind, differences):
    log_prob = torch.tensor(differences, dtype=F64, requires_grad=True)
    value = kl_penalty(log_prob, torch.zeros(len(differences), dtype=F64), kind)
    (slope,) = torch.autograd.grad(value.sum(), log_prob)
    return value.detach().tolist(), slope.tolist()


@pytest.mark.parametrize("kind", ALIASES)
def test_kinds_are_their_formulas(kind):
    formula = FORMULAS[ALIASES[kind]]
    values, slopes = penalty_and_slope(kind, DIFFERENCES)
    assert values == pytest.approx([formula(d) for d in DIFFERENCES], rel=1e-12, abs=1e-15)
    for d, slope in zip(DIFFERENCES, slopes):
        if d != 0 and not (formula is FORMULAS["k3"] and formula(d) == 10):  # |d| has a corner at 0; see the next test
            numeric = (formula(d + 1e-6) - formula(d - 1e-6)) / 2e-6
            assert slope == pytest.approx(numeric, rel=1e-4, abs=1e-6)


def test_k3_draws_a_far_policy_back_as_at_its_bound():
    """The value stops at 10, the slope, 1 − exp(−d), stays what it is there."""
    far = [-30.0, -3.0, -2.7, 11.1, 25.0]
    values, slopes = penalty_and_slope("k3", far)
    assert values == [10.0] * 5
    assert slopes == pytest.approx([-12.6108686] * 3 + [0.9999833] * 2, rel=1e-7)
    (_, near), (_, beyond) = (penalty_and_slope("k3", [-2.6108686 + e]) for e in (1e-6, -1e-6))
    assert near == pytest.approx(beyond, rel=1e-4)


@pytest.mark.parametrize("kind", ALIASES)
def test_a_plus_keeps_the_value_and_takes_the_slope_of_k2(kind):
    values, _ = penalty_and_slope(kind, DIFFERENCES)
    plus, slopes = penalty_and_slope(kind + "+", DIFFERENCES)
    assert plus == values
    assert slopes == DIFFERENCES


def test_k3_is_not_negative_and_exact_for_close_policies():
    difference = torch.linspace(-1e-3, 1e-3, 101)  # float32, as in training
    value = kl_penalty(difference, torch.zeros(101), "k3")
    assert (value >= 0).all()
    torch.testing.assert_close(value, difference.square() / 2, rtol=1e-3, atol=1e-11)


def test_k1_and_k3_average_to_the_divergence_and_k2_plus_has_its_gradient():
    """Over a whole distribution, not samples: Σ π · penalty = KL(π‖ref), and E[k2's slope · ∇ log π] = ∇ KL."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, generator=generator, dtype=F64).mul(0.5).requires_grad_()
    log_prob = logits.log_softmax(0)
    ref = torch.randn(8, generator=generator, dtype=F64).mul(0.5).log_softmax(0)
    weights = log_prob.detach().exp()
    divergence = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=log_prob), torch.distributions.Categorical(logits=ref)
    )
    for kind in ("k1", "k3"):
        torch.testing.assert_close((weights * kl_penalty(log_prob, ref, kind)).sum(), divergence)
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    for kind in ("k1+", "k3+"):
        (estimated,) = torch.autograd.grad((weights * kl_penalty(log_prob, ref, kind)).sum(), logits, retain_graph=True)
        torch.testing.assert_close(estimated, exact)


def test_unknown_kinds_name_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'low_var_kl'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "low_var_k1")


@pytest.mark.parametrize(("current_kl", "factor"), [(0.55, 1.01), (50.0, 1.02), (0.0, 0.98)])  # errors are cut at ±0.2
def test_an_adaptive_coefficient_follows_its_recursion(current_kl, factor):
    assert adapt_kl_coef(0.1, current_kl, 100, target_kl=0.5, horizon=1000) == pytest.approx(0.1 * factor)


def test_kl_in_the_reward_is_taken_from_sampled_tokens_alone():
    log_prob = torch.tensor([[-1.0, -2.0, float("nan")], [-0.5, 7.0, -3.0]])
    ref = torch.tensor([[-1.5, -1.0, 0.0], [-0.25, float("inf"), -1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, -1.0]], dtype=torch.float64)
    penalised, mean = apply_kl_penalty(rewards, log_prob, ref, mask, kind="kl", kl_coef=0.1)
    assert penalised.dtype == torch.float64
    expected = [[-0.05, 1.1, 0.0], [0.025, 0.0, -0.8]]
    torch.testing.assert_close(penalised, torch.tensor(expected, dtype=torch.float64))
    assert mean == pytest.approx((0.5 - 1.0 - 0.25 - 2.0) / 4)
