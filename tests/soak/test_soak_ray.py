"""Runs on Ray that take minutes: the quickstart with 1, 2 and 4 workers on one node and on two, the documents' commands, a
worker that is killed, a driver that is."""

import os
import signal

import psutil
import pytest
from async_stage import plan, trained
from commands_stage import COMMANDS, MODEL, arguments_of, corrected
from house_stage import ACTOR, ROLLOUT, Launched, metrics, same, steps, weights
from ray_stage import rank_processes, ray_cluster
from wait_stage import until

from etude.cli.main import cli, run
from etude.config import compose
from etude.quickstart.example import CALCULATOR, find_example
from etude.quickstart.prepare import TOOLS
from etude.quickstart.stages import Quickstart
from etude.trainer.run import train

pytest.importorskip("ray")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
STEPS = 12


@pytest.fixture(scope="module")
def nodes():
    with ray_cluster(4, 4, connect=False) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(nodes):
    return ("trainer.backend=ray", f"ray.address={nodes.address}")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """Trains the quickstart's model: (run folder, metrics) of some settings."""
    folder = tmp_path_factory.mktemp("quickstart")
    Quickstart(find_example(CALCULATOR), folder, 1, (), lambda text: None).warm_up()

    def trained(name, *settings):
        given = [
            f"data.train_files={folder}/data/train.parquet",
            f"{MODEL}.path={folder}/warm_up/huggingface",
            f"trainer.total_training_steps={STEPS}",
            f"trainer.default_local_dir={folder}/{name}",
            "trainer.logger=[jsonl]",
            *settings,
        ]
        train(compose("quickstart", given))
        return metrics(folder / name)

    return trained


@pytest.fixture(scope="module")
def in_process(quickstart):
    return quickstart("local")


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)])
def test_the_quickstart_learns_alike_with_any_number_of_workers(quickstart, in_process, cluster, count, workers):
    place = (f"trainer.nnodes={count}", f"trainer.n_gpus_per_node={workers // count}")
    found = quickstart(f"{count}-{workers}", *cluster, *place)
    assert found[0]["actor/loss"] == pytest.approx(in_process[0]["actor/loss"], abs=1e-5)
    for name in ("reward/total/mean", "actor/entropy"):
        here, there = ([each[name] for each in run] for run in (in_process, found))
        assert sum(there) / STEPS == pytest.approx(sum(here) / STEPS, abs=0.05)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_documents_commands_run_on_ray(name, tiny, tmp_path, cluster):
    place, arguments = arguments_of(name, tmp_path)
    here = [
        f"data.train_files={tiny.folder}/data/train.parquet",
        f"data.val_files={tiny.folder}/data/test.parquet",
        f"{MODEL}.path={tiny.model}",
        f"{ROLLOUT}.multi_turn.tool_config_path={TOOLS}",
        f"{ROLLOUT}.name=native",
        f"{ROLLOUT}.n=2",
        f"{ROLLOUT}.max_model_len=null",
        "data.train_batch_size=2",
        "data.max_prompt_length=128",
        "data.max_response_length=72",
        f"{ACTOR}.ppo_mini_batch_size=2",
        "trainer.logger=[jsonl]",
        "trainer.report=false",
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=2",
        *cluster,
    ]
    if "critic.model.path=a" in arguments:
        here.append(f"critic.model.path={tiny.model}")
    options = [f"--config-{key.removeprefix('config_')}={value}" for key, value in place.items() if value]
    assert run(cli, ["train", *options, *corrected(name, arguments), *here]) == 0
    assert metrics(tmp_path / "run")[-1]["step"] == 1


def test_all_roles_in_lockstep_on_two_nodes(tiny, tmp_path, cluster):
    """Critic, batch scorer and reference beside the policy, in lock-step rollouts."""
    settings = ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", f"{ROLLOUT}.mode=sync")
    settings += ("trainer.total_training_steps=2", f"{ACTOR}.ppo_mini_batch_size=1")
    train(tiny.config(tmp_path / "local", *settings))
    train(tiny.config(tmp_path / "ray", *settings, *cluster, "trainer.nnodes=2"))
    for here, there in zip(metrics(tmp_path / "local"), metrics(tmp_path / "ray"), strict=True):
        for name in ("actor/loss", "critic/vf_loss", "reward/total/mean", "reward/score/mean"):
            assert there.get(name) == pytest.approx(here.get(name), abs=1e-4)


def test_a_run_whose_worker_is_killed_ends_in_one_line_and_resumes(tiny, tmp_path, nodes, cluster):
    settings = ("trainer.n_gpus_per_node=2", "trainer.save_freq=1", *cluster)
    endless = tiny.arguments(tmp_path / "run", *settings, "trainer.total_training_steps=5000", "trainer.max_restarts=0")
    launched = Launched(["train", *endless], tmp_path / "log")
    until(lambda: (tmp_path / "run" / "global_step_2").exists() or not launched.process.is_alive(), launched.text())
    os.kill(rank_processes(nodes)[-1], signal.SIGKILL)
    assert launched.wait() == 2
    (line,) = [line for line in launched.text().splitlines() if line.startswith("error: ")]
    assert "Worker, rank" in line  # of the policy, or of the batches
    assert "died" in line
    assert "Traceback" not in launched.text()
    until(lambda: not rank_processes(nodes), "ranks are left")
    done = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    total = f"trainer.total_training_steps={done + 2}"
    train(tiny.config(tmp_path / "run", *settings, total))
    train(tiny.config(tmp_path / "whole", *settings, total))
    assert steps(tmp_path / "run") == list(range(1, done + 3))
    assert same(weights(tmp_path / "run", done + 2), weights(tmp_path / "whole", done + 2))


def test_a_run_goes_on_with_the_nodes_that_are_left(tiny, tmp_path):
    with ray_cluster(2, 2, connect=False) as nodes:
        run = Goes(tiny, tmp_path, f"ray.address={nodes.address}", "trainer.nnodes=2", "trainer.min_nnodes=1")
        nodes.remove_node(nodes.list_all_nodes()[-1], allow_graceful=False)
        run.goes_on()
        assert "trainer.min_nnodes lets the run go on with 1" in run.launched.text()
        run.ends()


def test_a_cluster_of_the_runs_own_that_loses_its_head_starts_again(tiny, tmp_path):
    run = Goes(tiny, tmp_path)
    (head,) = [pid for pid in descendants(run.launched.process.pid) if "gcs_server" in psutil.Process(pid).name()]
    os.kill(head, signal.SIGKILL)
    run.goes_on()
    run.ends()


def test_a_cluster_that_loses_its_head_is_one_line_and_the_run_resumes(tiny, tmp_path):
    with ray_cluster(4, connect=False) as nodes:
        run = Goes(tiny, tmp_path, f"ray.address={nodes.address}")
        nodes.head_node.kill_gcs_server()
        until(lambda: not run.launched.process.is_alive(), run.launched.text())
        assert run.launched.wait() == 2
    said = run.launched.text().splitlines()
    assert said[-1].startswith("error: ")
    assert said[-1].endswith("; the same command resumes the run")
    assert f"the cluster's head at {nodes.address} does not answer" in said[-1]
    done = len(steps(tmp_path / "run"))
    train(tiny.config(tmp_path / "run", f"trainer.total_training_steps={done + 2}"))
    assert sorted(trained(tmp_path / "run")) == plan(done + 2)


class Goes:
    """An endless run on two ranks, which has a checkpoint."""

    def __init__(self, tiny, folder, *settings):
        self.folder = folder / "run"
        given = ("trainer.backend=ray", "trainer.save_freq=1", "ray.node_timeout=5", *settings)
        if not any("nnodes" in each for each in given):
            given += ("trainer.n_gpus_per_node=2",)
        arguments = tiny.arguments(self.folder, *given, "trainer.total_training_steps=5000")
        self.launched = Launched(["train", *arguments], folder / "log")
        self._until(lambda: (self.folder / "latest_checkpointed_iteration.txt").exists())

    def _until(self, condition):
        until(lambda: condition() or not self.launched.process.is_alive(), self.launched.text())
        assert self.launched.process.is_alive(), self.launched.text()

    def goes_on(self):
        self._until(lambda: "the workers start again" in self.launched.text())
        before = self.saved()
        self._until(lambda: self.saved() > before)

    def saved(self):
        return int((self.folder / "latest_checkpointed_iteration.txt").read_text())

    def ends(self):
        self.launched.signal(signal.SIGINT)
        assert self.launched.wait() == 128 + signal.SIGINT
        assert "Traceback" not in self.launched.text()
        assert sorted(trained(self.folder)) == plan(self.saved())
        assert weights(self.folder, self.saved())


@pytest.mark.parametrize("own", [False, True])
def test_nothing_outlives_a_driver_that_is_killed(tiny, tmp_path, nodes, cluster, own):
    """On a cluster that runs, and on one that the run started."""
    where = ("trainer.backend=ray",) if own else cluster
    launched = Launched(
        ["train", *tiny.arguments(tmp_path / "run", "trainer.total_training_steps=5000", *where)], tmp_path / "log"
    )
    until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() or not launched.process.is_alive(), launched.text())
    started = descendants(launched.process.pid) if own else rank_processes(nodes)
    assert started
    launched.signal(signal.SIGKILL)
    launched.wait()
    until(lambda: not any(map(os.path.exists, [f"/proc/{pid}" for pid in started])), "processes are left")


def descendants(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]
