"""Policy losses, KL penalties and the value loss against verl 0.9.1's, as recorded by `record_verl_losses.py`.

Differences on purpose, none of which the recorded cases meet:

- Defaults are each loss's own; verl's `clip_ratio_low` and `clip_ratio_high` of 0.2 hold for all, its `clip_ratio_c` of 3
  for DPPO too, whose code means 20.
- `geo_mean` is a mean over the mini-batch's rollouts, not over a micro-batch's rows, empty ones included; weights of a
  correction are one a token, not their geometric mean.
- `clip_cov` and `kl_cov` select tokens over the whole mini-batch by the log-probs of the policy that sampled, not in each
  micro-batch by the current ones; `clip_cov` picks evenly spread ones, also among those that the ratio clips, and not at
  random; `kl_cov` has no penalty where a ratio is 1 but for rounding.
- `sapo` takes the configured aggregation, its own where none is.
- Log-ratios are within ±20 in every loss; k3 has a slope where its value is at the bound of 10.
"""

import json
from pathlib import Path

import pytest
import torch
from record_verl_losses import inputs

from etude.algorithms import POLICY_LOSSES, adapt_kl_coef, kl_penalty, policy_loss, value_loss

VERL = json.loads((Path(__file__).parent / "data" / "verl_losses.json").read_text())
SELECTED_BY = {"clip_cov", "kl_cov"}
F64 = torch.float64


def assert_equal(value, recorded):
    torch.testing.assert_close(value, torch.tensor(recorded, dtype=F64), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("recorded", VERL["cases"], ids=lambda r: f"{r['loss']}-{r['mode']}-{r['weighted']}")
def test_a_policy_loss_is_verls(recorded):
    name, case = recorded["loss"], inputs()
    weights = case.pop("weights") if recorded["weighted"] else None
    case.pop("weights", None)
    if name == "geo_mean" and recorded["weighted"]:
        pytest.skip("verl takes the geometric mean of a sequence's weights")
    log_prob = case["log_prob"].requires_grad_()
    options = {**recorded["options"], **recorded["options"].get("policy_loss", {})}
    options.pop("policy_loss", None)
    if name in SELECTED_BY:  # verl selects by the current log-probs
        columns = {key: case[key] for key in ("advantages", "response_mask")}
        chosen = POLICY_LOSSES.get(name).select_tokens(old_log_probs=log_prob.detach(), **columns, **options)
        options["selected_tokens"] = chosen
    loss, metrics = policy_loss(name, **case, loss_agg_mode=recorded["mode"], rollout_is_weights=weights, **options)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert_equal(loss.detach(), recorded["value"])
    assert_equal(gradient, recorded["gradient"])
    theirs = {key: value for key, value in recorded["metrics"].items() if key in metrics}
    if name == "kl_cov":
        theirs.pop("actor/ppo_kl")  # verl's is a mean of |log r|
    assert {key: metrics[key] for key in theirs} == pytest.approx(theirs, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", POLICY_LOSSES.built_in)
def test_the_documentation_has_its_row(name):
    record, page = POLICY_LOSSES.get(name), (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text("utf-8")
    section = page.partition("## Policy losses")[2]
    [row] = [line for line in section.splitlines() if line.startswith("| `") and f"`{name}`" in line.split(" | ")[0]]
    for option, value in record.defaults.items():
        assert (f"`{option}` {value:g}" if value is not None else f"`{option}`: must be set") in row
    assert f"| `{record.loss_agg_mode}` |" in row


@pytest.mark.parametrize("recorded", VERL["kl"], ids=lambda r: r["kind"])
def test_a_kl_penalty_is_verls(recorded):
    case = inputs()
    log_prob = case["log_prob"].requires_grad_()
    value = kl_penalty(log_prob, case["old_log_prob"], recorded["kind"])
    (gradient,) = torch.autograd.grad(value.sum(), log_prob)
    assert_equal(value.detach(), recorded["value"])
    assert_equal(gradient, recorded["gradient"])


@pytest.mark.parametrize("recorded", VERL["value loss"], ids=lambda r: r["mode"])
def test_the_value_loss_is_verls(recorded):
    case = inputs()
    vpreds = case["log_prob"].requires_grad_()
    columns = {"values": case["old_log_prob"], "returns": case["weights"], "response_mask": case["response_mask"]}
    loss, metrics = value_loss(vpreds=vpreds, **columns, cliprange_value=0.3, loss_agg_mode=recorded["mode"])
    (gradient,) = torch.autograd.grad(loss, vpreds)
    assert_equal(loss.detach(), recorded["value"])
    assert_equal(gradient, recorded["gradient"])
    assert metrics["critic/vf_clipfrac"] == pytest.approx(recorded["clipped"])


def test_the_adaptive_coefficient_is_verls():
    coefficient = 0.1
    for current, theirs in zip((0.55, 50.0, 0.0, 0.5), VERL["adaptive kl"], strict=True):
        coefficient = adapt_kl_coef(coefficient, current, 100, target_kl=0.5, horizon=1000)
        assert coefficient == pytest.approx(theirs, rel=1e-12)
