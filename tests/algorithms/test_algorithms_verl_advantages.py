"""Advantage estimators against verl 0.9.1's, as recorded by `record_verl_advantages.py`.

Differences on purpose:

- A group of one has advantage 0; verl's raw score is `singleton_advantage=raw`, which is compared here. (verl's vectorised
  forms have 0 as well, its `grpo_passk` refuses such a group.)
- Groups of equal scores have advantage 0 exactly, also in the optimal token baseline, where verl divides rounding and pays
  the longest answer's tail its raw return.
- `gpg` scales by rollouts / rollouts in groups with an advantage, as its paper does; verl by rollouts / rollouts whose score
  is not 0, which depends on where the rewards' zero is.
- `optimal_token_baseline` counts sampled tokens, as its multi-turn form does; verl's compares tokens at the same position,
  though tools' answers before them have other lengths.
- Advantages and returns are 0 on masked tokens.
"""

import json
from pathlib import Path

import pytest
import torch

from etude.algorithms import ADVANTAGE_ESTIMATORS, compute_advantage

RECORDED = json.loads((Path(__file__).parent / "data" / "verl_advantages.json").read_text())
UIDS = RECORDED["uids"]
SINGLES_AT_ZERO = ("rloo_vectorized", "grpo_passk")


def name_of(recorded):
    return recorded["name"].rpartition(".")[2].lower()


def ours(name, case, options):
    tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in case.items()}
    mask = tensors.pop("response_mask").long()
    components = {key: tensors.pop(key) for key in ("format", "accuracy")}
    record = ADVANTAGE_ESTIMATORS.get(name)
    own = {
        "singleton_advantage": "zero" if name in SINGLES_AT_ZERO else "raw",
        "gdpo_reward_keys": ["format", "accuracy"],
        "gdpo_reward_weights": [1.0, 0.5],
        **options,
    }
    given = {key: value for key, value in own.items() if record.reads(key)}
    advantages, returns = compute_advantage(
        name,
        token_level_rewards=tensors.pop("token_level_rewards"),
        response_mask=mask,
        index=UIDS,
        reward_components=components,
        **tensors,
        **given,
    )
    return advantages, returns, mask


@pytest.mark.parametrize(
    "recorded", RECORDED["results"], ids=lambda r: f"{name_of(r)}-{r['case']}-{r['options']['lam']}"
)
def test_an_estimator_is_verls(recorded):
    name, case = name_of(recorded), RECORDED["cases"][recorded["case"]]
    has_holes = any(0 in row[: sum(row)] for row in case["response_mask"])
    if name == "optimal_token_baseline" and has_holes:
        pytest.skip("verl's compares tokens at the same position")
    advantages, returns, mask = ours(name, case, recorded["options"])
    theirs = [torch.tensor(part, dtype=torch.float64) for part in recorded["returned"]]
    if name == "gpg":  # both undone
        scores = torch.tensor(case["token_level_rewards"]).sum(1)
        theirs = [part * int((scores != 0).sum()) / len(UIDS) for part in theirs]
    assert bool((mask > 0).any(dim=1).all())
    torch.testing.assert_close(advantages, theirs[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(returns, theirs[1], rtol=1e-6, atol=1e-6)


def test_every_estimator_of_verl_is_recorded():
    names = {name_of(recorded) for recorded in RECORDED["results"]}
    assert len(names) == 14
    assert names <= set(ADVANTAGE_ESTIMATORS.names())


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.built_in)
def test_the_documentation_has_its_row(name):
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text("utf-8")
    section = page.partition("## Advantages")[2].partition("\n## ")[0]
    if name.endswith("_vectorized"):
        assert f"`{name}`" in section
        return
    [row] = [line for line in section.splitlines() if line.startswith("| `") and f"`{name}`" in line.split(" | ")[0]]
    general = {"singleton_advantage"}
    assert all(f"`{option}`" in row for option in ADVANTAGE_ESTIMATORS.get(name).option_names - general)
