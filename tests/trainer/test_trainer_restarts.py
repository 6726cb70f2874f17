"""Runs on Ray that lose a worker, a node, or the head of their cluster: they go on from the last checkpoint, or end in one
line, and account for every prompt."""

import logging
import os
import signal

import pytest
from async_stage import ASYNC, accounts, plan, trained
from house_stage import steps, weights
from ray_stage import is_running, ray_cluster, until

from etude.distributed import cluster as connection
from etude.errors import WorkerLost
from etude.options import TrainOptions
from etude.options.validate import to_options
from etude.trainer import groups as opened
from etude.trainer import restarts
from etude.trainer.checkpoints import Checkpoints
from etude.trainer.interrupts import Interrupted
from etude.trainer.ppo import PPOTrainer
from etude.trainer.run import fine_tune, train
from etude.trainer.setup import plain_config

ray = pytest.importorskip("ray")
TWO = ("trainer.backend=ray", "trainer.n_gpus_per_node=2")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(restarts, "_MAX_PAUSE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def nodes():
    with ray_cluster(2, 2, connect=False) as made:
        yield made


@pytest.fixture(scope="module")
def two(nodes):
    return (*TWO, f"ray.address={nodes.address}")


def kills(monkeypatch, when, rank=-1):
    """A rank dies as the step after each of `when` begins, the first time that it does."""
    step, left, dead = PPOTrainer.training_step, list(when), []

    def stepped(self, interrupts):
        if left and self.global_step == left[0]:
            dead.append((left.pop(0), self.groups.actor._ranks[rank].place.pid))
            os.kill(dead[-1][1], signal.SIGKILL)
        return step(self, interrupts)

    monkeypatch.setattr(PPOTrainer, "training_step", stepped)
    return dead


def losses(caplog):
    """The lines that say what was lost."""
    return [record.getMessage() for record in caplog.records if record.name == restarts.__name__]


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_goes_on_from_its_checkpoints(tiny, tmp_path, two, monkeypatch, caplog):
    dead = kills(monkeypatch, [0, 3])
    run = tmp_path / "run"
    train(tiny.config(run, *two, "trainer.save_freq=2", "trainer.max_restarts=1"))
    assert [step for step, _ in dead] == [0, 3]
    first, second = losses(caplog)
    assert "ActorRolloutRefWorker, rank 1 of 2, on node " in first
    assert first.endswith("s from where the run began (trainer.max_restarts: 1 of 1)")
    assert second.endswith(f"s from {run}/global_step_2 (trainer.max_restarts: 1 of 1)")
    assert not any(is_running(pid) for _, pid in dead)
    assert steps(run) == [line["step"] for line in accounts(run)] == [1, 2, 3, 4, 5, 6]
    assert sorted(trained(run)) == plan(6)
    train(tiny.config(tmp_path / "whole"))
    ours, theirs = weights(run, 6), weights(tmp_path / "whole", 6)
    assert all((ours[name] - theirs[name]).abs().max() < 1e-3 for name in theirs)
