"""Kills of ranks, tool servers, sandboxes and scorers at random moments of one run, which goes on."""

import random

import pytest
from chaos_stage import MARKS, ChaosRun, unleash
from ray_stage import ray_cluster

pytest.importorskip("ray")
pytest.importorskip("mcp")


@pytest.mark.slow
def test_a_run_goes_on_whatever_is_killed_and_accounts_for_every_prompt(tiny, tmp_path, isolation):
    dice = random.Random()
    kinds = [*MARKS, "rank"]
    dice.shuffle(kinds)
    with ray_cluster(4, connect=False) as nodes:
        run = ChaosRun(tiny, nodes, tmp_path)
        unleash(run, dice, kinds, 1.0)
        said = run.stop()
    assert run.killed == dict.fromkeys(kinds, 1)
    [line] = [line for line in said.splitlines() if "the workers start again" in line]
    assert "Worker, rank " in line
