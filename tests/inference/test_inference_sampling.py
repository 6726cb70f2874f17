"""Sampling: the right distribution, the right log-probs, reproducible draws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.inference import SamplingParams
from etude.inference.sampling import restrict, sample, uniforms


def chi_square(counts, probs):
    expected = probs * counts.sum()
    used = expected > 0
    assert counts[~used].sum() == 0
    return float((((counts - expected) ** 2)[used] / expected[used]).sum()), int(used.sum()) - 1


def p_value(statistic, degrees):
    """Upper tail of the chi-square distribution."""
    return float(torch.special.gammaincc(torch.tensor(degrees / 2.0), torch.tensor(statistic / 2.0)))


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 6, "top_p": 0.8}]
)
def test_draws_follow_the_distribution_they_report(options):
    torch.manual_seed(0)
    logits = torch.randn(12) * 1.5
    draws = 20_000
    params = [SamplingParams(seed=i, **options) for i in range(draws)]
    tokens, log_probs, kept = sample(logits.expand(draws, -1), params, [3] * draws)
    reported = torch.zeros(12, dtype=torch.float64)
    reported[tokens] = log_probs.double().exp()
    counts = torch.bincount(tokens, minlength=12).double()
    assert reported.sum() == pytest.approx(1.0, abs=1e-5)  # every possible token was drawn, and they sum to one
    possible = reported.nonzero().squeeze(1).tolist() if "top_k" in options or "top_p" in options else None
    assert all((ids and ids.tolist()) == possible for ids in kept)
    assert p_value(*chi_square(counts, reported / reported.sum())) > 1e-6


def test_uniforms_are_uniform_along_positions_and_seeds():
    for values in (uniforms([7] * 50_000, range(50_000)), uniforms(range(50_000), [0] * 50_000)):
        counts = torch.histc(values.float(), bins=100, min=0, max=1).double()
        assert p_value(*chi_square(counts, torch.full((100,), 0.01, dtype=torch.float64))) > 1e-6
        pairs = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1]
        assert abs(float(pairs)) < 0.02


def test_draw_depends_on_seed_and_position_only():
    logits = torch.randn(3, 50)
    params = [SamplingParams(seed=4), SamplingParams(seed=5, top_k=3), SamplingParams(seed=6, temperature=0.5)]
    together, _, kept = sample(logits, params, [0, 9, 2])
    alone = [int(sample(logits[i : i + 1], [params[i]], [p])[0]) for i, p in enumerate([0, 9, 2])]
    assert together.tolist() == alone
    assert [ids and ids.tolist() for ids in kept] == [None, sorted(logits[1].topk(3).indices.tolist()), None]


def test_a_head_is_the_top_of_the_distribution_that_was_drawn_from():
    torch.manual_seed(1)
    logits = torch.randn(5, 12)
    ways = ({}, {"temperature": 0.5}, {"top_k": 3}, {"temperature": 0.5, "top_k": 6, "top_p": 0.7}, {"temperature": 0})
    params = [SamplingParams(top_logprobs=4, **each) for each in ways]
    *heads, greedy = sample(logits, params, [0] * 5)[2]
    assert greedy is None
    for row, (head, asked) in enumerate(zip(heads, params)):
        drawn_from = restrict(logits[row : row + 1] / asked.temperature, [asked])[0].log_softmax(dim=-1)
        possible = drawn_from.isfinite().nonzero().flatten().tolist()
        expected = drawn_from.topk(min(4, len(possible)))
        assert head.ids.tolist() == expected.indices.tolist()
        assert head.log_probs.tolist() == pytest.approx(expected.values.tolist(), abs=1e-6)
        assert (head.kept and head.kept.tolist()) == (possible if asked.top_k > 0 else None)


def test_greedy_is_argmax_with_probability_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    tokens, log_probs, kept = sample(logits, [SamplingParams(temperature=0, top_k=1), SamplingParams()], [0, 0])
    assert kept == [None, None]
    assert int(tokens[0]) == 1
    assert float(log_probs[0]) == 0.0
    assert float(log_probs[1]) < 0.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=2, max_size=30), st.integers(1, 40), st.floats(0.01, 1.0))
def test_restriction_keeps_the_smallest_sufficient_set(values, top_k, top_p):
    logits = torch.tensor([values])
    kept = torch.isfinite(restrict(logits, [SamplingParams(top_k=top_k, top_p=top_p)])[0])
    order = logits[0].sort(descending=True, stable=True).indices
    in_order = kept[order]
    count = int(kept.sum())
    assert 1 <= count <= min(top_k, len(values))
    assert in_order[:count].all()  # a prefix of the ranking
    if top_p < 1:
        within_k = torch.softmax(logits[0][order[:top_k]].double(), -1)
        assert within_k[: count - 1].sum() < top_p


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0.0}, {"top_k": 0}, {"max_tokens": 0}])
def test_impossible_parameters_are_refused(bad):
    with pytest.raises(ConfigError):
        SamplingParams(**bad)


def test_unknown_parameter_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        SamplingParams.of({"temprature": 1.0})
