"""Policy and value losses against scalar references; gradients against finite differences; masks against anything."""

import math

import pytest
import torch

from etude.algorithms import LOSS_AGG_MODES, POLICY_LOSSES, policy_loss, value_loss
from etude.errors import ConfigError

F64 = torch.float64


def random_case(seed, rows=4, width=6):
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(rows, width, generator=generator, dtype=F64)

    mask = (torch.rand(rows, width, generator=generator) < 0.7).long()
    mask[0, 0], mask[-1] = 1, 0
    old = -normal().abs()
    return {"old_log_prob": old, "log_prob": old + 0.8 * normal(), "advantages": normal(), "response_mask": mask}


def vanilla_reference(log_prob, old, advantage, low, high, dual):
    """One token of PPO's objective, by cases."""
    ratio = math.exp(max(-20.0, min(20.0, log_prob - old)))
    bounded = max(1 - low, min(1 + high, ratio))
    if advantage >= 0:
        return -min(ratio * advantage, bounded * advantage)
    return -max(min(ratio * advantage, bounded * advantage), dual * advantage)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({}, (0.2, 0.2, 3.0)),
        ({"clip_ratio": 0.5}, (0.5, 0.5, 3.0)),
        ({"clip_ratio_low": 0.1, "clip_ratio_high": 0.4, "clip_ratio_c": 1.5}, (0.1, 0.4, 1.5)),
        ({"clip_ratio": 0.3, "clip_ratio_high": 0.6}, (0.3, 0.6, 3.0)),
    ],
)
def test_vanilla_is_the_clipped_surrogate(seed, options, bounds):
    case = random_case(seed, rows=8)
    loss, metrics = policy_loss("vanilla", **case, **options)
    tokens = [
        (lp, old, a)
        for lps, olds, advantages, mask in zip(
            *(case[k].tolist() for k in ("log_prob", "old_log_prob", "advantages", "response_mask"))
        )
        for lp, old, a, m in zip(lps, olds, advantages, mask)
        if m
    ]
    low, high, dual = bounds
    expected = math.fsum(vanilla_reference(*token, low, high, dual) for token in tokens) / len(tokens)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    clipped = [a * (math.exp(lp - old) - max(1 - low, min(1 + high, math.exp(lp - old)))) > 0 for lp, old, a in tokens]
    dual_clipped = [a < 0 and math.exp(lp - old) > max(dual, 1 + high) for lp, old, a in tokens]
    assert metrics["actor/pg_clipfrac"] == pytest.approx(sum(clipped) / len(tokens))
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(sum(dual_clipped) / len(tokens))
    assert metrics["actor/ppo_kl"] == pytest.approx(math.fsum(old - lp for lp, old, _ in tokens) / len(tokens))


def test_each_clip_is_met_by_the_cases_above():
    """A guard for the test above: its random tokens must reach every branch."""
    case = random_case(0, rows=200)
    metrics = policy_loss("vanilla", **case)[1]
    assert metrics["actor/pg_clipfrac"] > 0.1
    assert metrics["actor/pg_clipfrac_lower"] > 0.01


def finite_difference(function, x, step=1e-6):
    gradient = torch.zeros_like(x)
    for i in range(x.numel()):
        shift = torch.zeros_like(x).view(-1)
        shift[i] = step
        shift = shift.view_as(x)
        gradient.view(-1)[i] = (float(function(x + shift)) - float(function(x - shift))) / (2 * step)
    return gradient


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_policy_gradient_is_the_slope(mode):
    case = random_case(11)
    options = {"loss_agg_mode": mode, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5}

    def function(log_prob):
        return policy_loss("vanilla", **{**case, "log_prob": log_prob}, **options)[0]

    log_prob = case["log_prob"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(log_prob), log_prob)
    assert gradient.any()
    torch.testing.assert_close(gradient, finite_difference(function, case["log_prob"]), rtol=1e-6, atol=1e-9)


def test_on_policy_the_gradient_is_the_policy_gradient():
    case = random_case(2)
    log_prob = case["old_log_prob"].clone().requires_grad_()
    loss, _ = policy_loss("vanilla", **{**case, "log_prob": log_prob}, loss_agg_mode="token-sum")
    loss.backward()
    torch.testing.assert_close(log_prob.grad, -case["advantages"] * case["response_mask"])


JUNK = [3.5, -1e30, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("column", ["old_log_prob", "log_prob", "advantages"])
def test_nothing_masked_reaches_the_policy_loss(mode, junk, column):
    case = random_case(5)
    masked = case["response_mask"] == 0

    def run(tensors):
        log_prob = tensors["log_prob"].clone().requires_grad_()
        loss, metrics = policy_loss("vanilla", **{**tensors, "log_prob": log_prob}, loss_agg_mode=mode)
        loss.backward()
        return loss.detach(), log_prob.grad, metrics

    loss, gradient, metrics = run(case)
    changed = run({**case, column: case[column].masked_fill(masked, junk)})
    assert torch.equal(changed[0], loss)
    assert torch.equal(changed[1], gradient)
    assert changed[2] == metrics
    assert not gradient[masked].any()


def test_a_ratio_beyond_all_bounds_stays_finite():
    case = random_case(6)
    case["log_prob"] = case["old_log_prob"] + 500.0
    log_prob = case["log_prob"].requires_grad_()
    loss, _ = policy_loss("vanilla", **case)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(log_prob.grad).all()


def test_an_empty_mask_gives_zero():
    case = random_case(7)
    case["response_mask"] = torch.zeros_like(case["response_mask"])
    for mode in LOSS_AGG_MODES:
        loss, metrics = policy_loss("vanilla", **case, loss_agg_mode=mode)
        assert float(loss) == 0
        assert set(metrics.values()) == {0.0}


def test_a_dual_clip_that_would_stop_learning_is_refused():
    with pytest.raises(ConfigError, match="clip_ratio_c must be greater than 1"):
        policy_loss("vanilla", **random_case(0), clip_ratio_c=1.0)
    with pytest.raises(ConfigError, match="did you mean 'vanilla'"):
        policy_loss("vanila", **random_case(0))


def value_case(seed, rows=4, width=6):
    generator = torch.Generator().manual_seed(seed)
    names = ("vpreds", "values", "returns")
    case = {name: torch.randn(rows, width, generator=generator, dtype=F64) for name in names}
    mask = (torch.rand(rows, width, generator=generator) < 0.7).long()
    mask[0, 0], mask[-1] = 1, 0
    return case | {"response_mask": mask}


def value_reference(v, old, target, c):
    bounded = min(max(v, old - c), old + c)
    return 0.5 * max((v - target) ** 2, (bounded - target) ** 2)


@pytest.mark.parametrize("c", [0.1, 0.5, 10.0])
def test_value_loss_is_the_worse_of_the_two_errors(c):
    case = value_case(0)
    loss, metrics = value_loss(**case, cliprange_value=c)
    rows = [case[k].flatten().tolist() for k in ("vpreds", "values", "returns", "response_mask")]
    tokens = [(v, old, target) for v, old, target, m in zip(*rows) if m]
    expected = math.fsum(value_reference(*token, c) for token in tokens) / len(tokens)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    worse = [value_reference(v, o, t, c) > 0.5 * (v - t) ** 2 for v, o, t in tokens]
    assert metrics["critic/vf_clipfrac"] == pytest.approx(sum(worse) / len(tokens))
    assert metrics["critic/vpred_mean"] == pytest.approx(math.fsum(v for v, _, _ in tokens) / len(tokens))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_value_gradient_is_the_slope(mode):
    case = value_case(1)

    def function(vpreds):
        return value_loss(**{**case, "vpreds": vpreds}, loss_agg_mode=mode)[0]

    vpreds = case["vpreds"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(vpreds), vpreds)
    torch.testing.assert_close(gradient, finite_difference(function, case["vpreds"]), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("column", ["vpreds", "values", "returns"])
def test_nothing_masked_reaches_the_value_loss(junk, column):
    case = value_case(2)
    masked = case["response_mask"] == 0

    def run(tensors):
        vpreds = tensors["vpreds"].clone().requires_grad_()
        loss, metrics = value_loss(**{**tensors, "vpreds": vpreds})
        loss.backward()
        return loss.detach(), vpreds.grad, metrics

    loss, gradient, metrics = run(case)
    changed = run({**case, column: case[column].masked_fill(masked, junk)})
    assert torch.equal(changed[0], loss)
    assert torch.equal(changed[1], gradient)
    assert changed[2] == metrics
    assert not gradient[masked].any()


@pytest.mark.parametrize("equal_advantages", [False, True])
def test_tokens_that_only_rounding_tells_apart_are_selected_in_their_order(equal_advantages):
    """Those of two rows with one beginning; and all where no advantage differs. Which ones is not up to how log-probs were
    batched."""
    select = POLICY_LOSSES.get("kl_cov").select_tokens
    old = torch.tensor([[-0.5, -2.0, -1.0]] * 2, dtype=F64)
    advantages = torch.full((2, 3), 0.1, dtype=F64)  # whose mean is another number
    if not equal_advantages:
        old, advantages = old.repeat(2, 1), torch.cat([advantages, -advantages])
    columns = {"advantages": advantages, "response_mask": torch.ones_like(old)}
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        noise = 1e-12 * torch.randn(old.shape, generator=generator, dtype=F64)
        chosen = select(old_log_probs=old + noise, kl_cov_ratio=1.5 / old.numel(), **columns).flatten().nonzero()
        assert chosen.tolist() == [[0 if equal_advantages else 7]]
