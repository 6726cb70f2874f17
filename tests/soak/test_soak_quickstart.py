"""The quickstart's promise: each seed a fresh process, minutes long. Nothing was tuned on the calculator's."""

import json
import subprocess
import sys

import pytest

from etude.options.model_path import named_folder

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def train(example, seed, folder):
    command = [sys.executable, "-m", "etude.cli.main", "quickstart", "--example", example]
    subprocess.run([*command, "--output-dir", str(folder), "--seed", str(seed)], check=True)
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.skipif(not named_folder("smollm2").is_dir(), reason="needs `etude models get smollm2`")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_pretrained_model_learns_to_use_the_calculator(seed, tmp_path):
    summary = train("stories", seed, tmp_path)
    assert summary["success_before"] <= 0.3
    assert summary["greedy_before"] <= 0.4
    assert min(summary["success_after"], summary["greedy_after"]) >= 0.9


@pytest.mark.parametrize("seed", [41, 42, 43, 44, 45])
def test_learns_to_use_the_calculator(seed, tmp_path):
    summary = train("calculator", seed, tmp_path)
    assert summary["samples"] >= 512
    assert 0.15 <= summary["success_before"] <= 0.45  # a window of [0.2, 0.4], measured again on other tasks
    for kind in ("success", "greedy"):
        before, after = summary[f"{kind}_before"], summary[f"{kind}_after"]
        assert after >= 0.8
        assert after - before >= 0.4
    assert summary["tool_use_after"] > summary["tool_use_before"] + 0.3
