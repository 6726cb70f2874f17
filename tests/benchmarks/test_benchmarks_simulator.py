"""The cluster simulator beside `etude scale`: the same costs, with groups that wait because they would be too stale."""

import runpy
from pathlib import Path

import pytest

from etude.cli.scale import Costs, Measured, Placement, Trajectory, Turn, predict

pytest.importorskip("simpy", reason="needs the extra 'scale'")
COSTS = Costs(step=0.01, row=0.001, prefill=0.0001, train=0.5, token=0.002, sync=0.25, driver=0.125)


@pytest.fixture(scope="module")
def simulator():
    return runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "cluster_simulator.py"))


@pytest.mark.parametrize(
    "placement", [Placement(1, 1, True), Placement(4, 4, True), Placement(1, 1, False, 1), Placement(2, 2, False, 4)]
)
def test_equal_trajectories_are_predicted_alike(simulator, placement):
    measured = Measured(COSTS, [Trajectory((Turn(10, 20, 0.0),), 0.0)], 8, 4, 64)
    simulated = simulator["predict"](measured, placement, steps=8)
    assert predict(measured, placement).step_seconds == pytest.approx(simulated.step_seconds, rel=0.1)


def test_the_programs_of_one_seed_are_one(simulator):
    measured = Measured(COSTS, [Trajectory((Turn(10, n, 1.0), Turn(5, 9, 0.0)), 0.0) for n in range(1, 50)], 8, 4, 64)
    found = [simulator["predict"](measured, Placement(1, 3, False, 2), steps=4) for _ in range(2)]
    assert found[0] == found[1]
