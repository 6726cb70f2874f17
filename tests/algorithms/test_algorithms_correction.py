"""Corrections of what the engine sampled: against verl's numbers, at their limits, and through the loss."""

import json
import math
from pathlib import Path

import pytest
import torch

from etude.algorithms import (
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    importance_weights,
    off_policy_sequence_mask,
    policy_loss,
    rejection_mask,
    rollout_mismatch,
)
from etude.metrics import Max, Mean, finish_metrics
from etude.options import RolloutCorrectionOptions

F64 = torch.float64
VERL = json.loads((Path(__file__).parent / "data" / "verl_correction.json").read_text())


def columns(case):
    return tuple(torch.tensor(case[name], dtype=F64) for name in ("old", "rollout", "mask"))


# What verl counts differently: the largest weight (here always that before truncation), the share of extreme sequences
# (there once a row and not once a token), and its further spreads.
OWN = {"rollout_is_max", "rollout_is_min", "rollout_is_std", "rollout_is_ratio_fraction_high"}


@pytest.mark.parametrize("case", VERL["cases"], ids=["near", "apart", "far"])
def test_weights_are_verls(case):
    assert VERL["verl"] == "0.9.1"
    old, rollout, mask = columns(case)
    assert len(case["weights"]) > 6
    for level, threshold, normalize, expected, figures in case["weights"]:
        options = RolloutCorrectionOptions(
            rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalize
        )
        weights, metrics = importance_weights(
            old - rollout, mask, level=level, bounds=options.is_bounds, batch_normalize=normalize
        )
        torch.testing.assert_close(weights, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-6)
        compared = 0
        for name, value in finish_metrics(metrics).items():
            name = name.removeprefix("rollout_corr/")
            if name in OWN or (level == "sequence" and "fraction" in name):
                continue
            assert value == pytest.approx(figures[name], abs=1e-6), name
            compared += 1
        assert compared >= 2


@pytest.mark.parametrize("case", VERL["cases"], ids=["near", "apart", "far"])
def test_rejections_are_verls(case):
    old, rollout, mask = columns(case)
    for names, thresholds, expected, figures in case["rejected"]:
        criteria = RolloutCorrectionOptions(rollout_rs=names, rollout_rs_threshold=thresholds).criteria
        kept, metrics = rejection_mask(old - rollout, mask, criteria)
        assert kept.tolist() == expected
        for name, value in finish_metrics(metrics).items():
            assert value == pytest.approx(figures[name.removeprefix("rollout_corr/")], abs=1e-6), name


@pytest.mark.parametrize("case", VERL["cases"], ids=["near", "apart", "far"])
def test_the_measures_are_verls(case):
    metrics = finish_metrics(rollout_mismatch(*columns(case)))
    shared = {name: value for name, value in case["measured"].items() if f"rollout_corr/{name}" in metrics}
    assert len(shared) == 9
    for name, value in shared.items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, abs=1e-6), name


ONES = torch.ones(2, 3, dtype=F64)


def test_weights_by_hand():
    ratio = torch.tensor([[2.0, 1.0, 0.5], [0.25, 1.0, 1.0]], dtype=F64).log()
    cut = importance_weights(ratio, ONES, level="token", bounds=1.5)[0]
    torch.testing.assert_close(cut, torch.tensor([[1.5, 1.0, 0.5], [0.25, 1.0, 1.0]], dtype=F64))
    icepop = importance_weights(ratio, ONES, level="token", bounds=(0.4, 1.5))[0]
    torch.testing.assert_close(icepop, torch.tensor([[0.0, 1.0, 0.5], [0.0, 1.0, 1.0]], dtype=F64))
    whole = importance_weights(ratio, ONES, level="sequence", bounds=9.0)[0]
    torch.testing.assert_close(whole, torch.tensor([[1.0], [0.25]], dtype=F64).expand(2, 3))
    one = importance_weights(ratio, ONES, level="sequence", bounds=9.0, rollout=torch.tensor([7, 7]))[0]
    torch.testing.assert_close(one, ONES / 4)  # the rows are parts of one rollout


def test_ratios_beyond_all_bounds_stay_finite():
    ratio = torch.tensor([[1e4, -1e4, 0.0]], dtype=F64)
    for level in ("token", "sequence"):
        weights, metrics = importance_weights(ratio, ONES[:1], level=level, bounds=1e30)
        assert weights.isfinite().all()
        assert all(map(math.isfinite, finish_metrics(metrics).values()))
    far = finish_metrics(rollout_mismatch(-ratio.abs(), ratio.clamp(max=0), ONES[:1]))
    assert all(map(math.isfinite, far.values()))
    assert not rejection_mask(ratio, ONES[:1], [("seq_max_k3", (0.0, 1.0))])[0].any()


def test_a_ratio_that_is_no_number_is_rejected():
    ratio = torch.tensor([[math.nan, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=F64)
    assert rejection_mask(ratio, ONES, [("token_k3", (0.0, 1.0))])[0].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert rejection_mask(ratio, ONES, [("seq_sum_k1", (0.5, 2.0))])[0].tolist() == [[0, 0, 0], [1, 1, 1]]


def test_a_policy_that_computes_no_numbers_is_measured_as_far_away():
    """Its gradients are skipped and counted; what measures it must not end the run."""
    broken = torch.tensor([[math.nan, -1.0, -math.inf], [-1.0, -1.0, -1.0]])
    found = finish_metrics(rollout_mismatch(broken, -ONES, ONES))
    assert found["rollout_corr/log_prob_diff_p99"] == pytest.approx(100.0)
    for level in ("token", "sequence"):
        importance_weights(broken + ONES, ONES, level=level, bounds=2.0, batch_normalize=True)
    off_policy_sequence_mask(broken, -ONES, -ONES, ONES, 0.5)


def test_nothing_sampled_is_nothing_measured():
    nothing = torch.zeros(2, 3)
    assert rollout_mismatch(nothing, nothing, nothing) == {}
    weights, metrics = importance_weights(nothing, nothing, level="sequence", bounds=2.0, batch_normalize=True)
    assert not weights.any()
    assert all(map(math.isfinite, finish_metrics(metrics).values()))
    assert not rejection_mask(nothing, nothing, [("seq_mean_k1", (0.5, 2.0))])[0].any()


def test_the_99th_percentile_is_within_a_bin():
    sizes = torch.rand(5000, generator=torch.Generator().manual_seed(0), dtype=F64).view(50, 100) * 3
    found = finish_metrics(rollout_mismatch(sizes - 9, torch.full_like(sizes, -9.0), torch.ones(50, 100)))
    exact = float(sizes.flatten().sort().values[4949])
    assert exact <= found["rollout_corr/log_prob_diff_p99"] <= exact * 10**0.05


def test_the_off_policy_mask_spares_what_should_become_likelier():
    engine = torch.tensor([[-1.0, -1.0, -1.0]] * 3, dtype=F64)
    policy = engine - torch.tensor([[0.9], [0.9], [0.1]], dtype=F64)
    advantages = torch.tensor([[-1.0, -1.0, 2.0], [1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]], dtype=F64)
    kept, metrics = off_policy_sequence_mask(policy, engine, advantages, torch.ones(3, 3), 0.5)
    assert kept.tolist() == [[0, 0, 1], [1, 1, 1], [1, 1, 1]]
    assert metrics["rollout_corr/off_policy_masked_fraction"] == Mean(2.0, 9.0)
    first_alone = torch.tensor([[0, 0, 1.0]] * 3)  # its mean counts sampled tokens only
    policy[:, 2] = -1.0
    assert off_policy_sequence_mask(policy, engine, -advantages.abs(), first_alone, 0.5)[0].all()
    rounding = torch.full((3, 3), -1e-17, dtype=torch.float64)
    assert off_policy_sequence_mask(policy, engine, rounding, torch.ones(3, 3), 0.5)[0].all()


OF_SEQUENCES = {"geo_mean", "vespo"}  # a token's weight reaches the others' gradients


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_a_weight_scales_a_tokens_gradient_and_no_denominator(name, mode):
    generator = torch.Generator().manual_seed(1)
    log_prob = -torch.rand(3, 5, generator=generator, dtype=F64)
    advantages, mask = torch.randn(3, 5, generator=generator, dtype=F64), torch.ones(3, 5)
    mask[0, 2:], mask[2] = 0, 0
    given = {"old_log_prob": log_prob, "advantages": advantages, "response_mask": mask, "loss_agg_mode": mode}
    options = {"dro_beta": 0.5} if name == "dro" else {}

    def gradient(**more):
        leaf = log_prob.clone().requires_grad_()
        policy_loss(name, log_prob=leaf, **given, **options, **more)[0].backward()
        return leaf.grad

    weights = torch.rand(3, 5, generator=generator, dtype=F64)
    torch.testing.assert_close(gradient(rollout_is_weights=torch.ones_like(weights)), gradient())
    if name not in OF_SEQUENCES:
        torch.testing.assert_close(gradient(rollout_is_weights=weights), gradient() * weights)
    weights[mask == 0] = math.nan
    assert gradient(rollout_is_weights=weights).isfinite().all()


def test_parts_are_means_and_maxima():
    """That ranks may add them up."""
    found = rollout_mismatch(*columns(VERL["cases"][1]))
    assert isinstance(found["rollout_corr/kl"], Mean)
    assert isinstance(found["rollout_corr/log_prob_diff_max"], Max)
