"""Half an hour in which something of a run is killed every 20 seconds: a rank, a tool server, a sandbox, a scorer."""

import random
import time

import pytest
from chaos_stage import MARKS, ChaosRun
from ray_stage import ray_cluster

pytest.importorskip("ray")
pytest.importorskip("mcp")
MINUTES = 30
pytestmark = [pytest.mark.soak, pytest.mark.timeout(60 * (MINUTES + 20))]


def test_a_run_outlives_half_an_hour_of_kills(tiny, tmp_path, isolation):
    dice, end = random.Random(), time.monotonic() + 60 * MINUTES
    with ray_cluster(4, 4, connect=False) as nodes:
        run = ChaosRun(tiny, nodes, tmp_path)
        run.wait_for(run.saved)
        while time.monotonic() < end:
            kind = dice.choice([*MARKS, "rank"])
            run.wait_for(lambda: run.kill(kind, dice))  # noqa: B023
            time.sleep(20)
        said = run.stop()
    assert "Traceback" not in said
    assert set(run.killed) == {*MARKS, "rank"}
