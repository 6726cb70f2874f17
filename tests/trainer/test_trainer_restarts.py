"""A run that loses a worker or its samples resumes by itself from its last checkpoint: it ends as one that lost nothing, and
accounts for every prompt. Here losses are raised; `test_trainer_ray.py` kills processes."""

import copy
import gc
import os
import signal
import weakref
from types import SimpleNamespace

import pytest
import torch
from async_stage import ASYNC, accounts, plan, slow_tool, trained
from house_stage import TOOLS, one_line_error, same, steps, weights
from safetensors.torch import load_file

from etude.cli.main import cli
from etude.cli.main import run as run_command
from etude.config import compose
from etude.distributed.plane import LostSamplesError
from etude.errors import ConfigError, InfrastructureError, WorkerLost, is_out_of_memory
from etude.trainer import restarts, run
from etude.trainer.interrupts import Interrupted
from etude.trainer.learning_signal import JudgeBudget
from etude.trainer.ppo import PPOTrainer
from etude.trainer.run import fine_tune, train
from etude.trainer.sft import SFTTrainer

SFT = (f"multi_turn.tool_config_path={TOOLS}", "trainer.total_training_steps=4", "data.train_batch_size=4")
SFT = (
    *SFT,
    "trainer.max_restarts=1",
    "trainer.num_threads=1",
    "trainer.logger=[jsonl]",
    "trainer.save_freq=2",
    "trainer.deterministic=true",
)
LOST = WorkerLost("ActorRolloutRefWorker, rank 1 of 2, on node a: died in update_actor; its last lines: none")


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The pauses before restarts, which take no time here."""
    made = []
    monkeypatch.setattr(restarts, "time", SimpleNamespace(sleep=made.append))
    return made


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(tiny.config(folder))
    return folder


def loses(monkeypatch, *when, error=LOST, method="_update_actor", trainer=PPOTrainer):
    """After `method` of each of these steps the worker is lost."""
    left, inner = list(when), getattr(trainer, method)

    def doing(self, *args, **kwargs):
        found = inner(self, *args, **kwargs)
        if left and (self.step if trainer is SFTTrainer else self.global_step) == left[0]:
            del left[0]
            raise copy.copy(error)  # whose traceback keeps the trainer
        return found

    monkeypatch.setattr(trainer, method, doing)


def logged(caplog):
    return [record.getMessage() for record in caplog.records if record.name == restarts.__name__]


@pytest.mark.parametrize("saves", ["async_save=false", "async_save=true", "resume_mode=disable"])
def test_what_is_lost_in_an_update_is_done_again_to_the_bit(tiny, tmp_path, whole, monkeypatch, caplog, pauses, saves):
    loses(monkeypatch, 1, 4)
    folder = tmp_path / "run"
    train(tiny.config(folder, "trainer.save_freq=2", "trainer.max_restarts=1", f"trainer.{saves}"))
    assert logged(caplog) == [
        f"{LOST}; the workers start again in 1 s from where the run began (trainer.max_restarts: 1 of 1)",
        f"{LOST}; the workers start again in 1 s from {folder}/global_step_4 (trainer.max_restarts: 1 of 1)",
    ]
    assert pauses == [1, 1]
    assert same(weights(folder, 6), weights(whole, 6))
    assert accounts(folder) == accounts(whole)
    assert steps(folder) == [1, 2, 3, 4, 5, 6]


def test_finished_steps_are_saved_where_the_actor_lives(tiny, tmp_path, whole, monkeypatch, caplog):
    """The loss is of a rollout: no weights have moved since the last step."""
    loses(monkeypatch, 3, error=LostSamplesError("held by node b, cannot be read"), method="_expand")
    folder = tmp_path / "run"
    train(tiny.config(folder))
    assert f"from {folder}/global_step_3" in logged(caplog)[0]
    assert same(weights(folder, 6), weights(whole, 6))


def test_what_is_lost_after_a_step_leaves_its_line(tiny, tmp_path, whole, monkeypatch, caplog):
    loses(monkeypatch, 3, method="_dump")
    paid = []
    monkeypatch.setattr(JudgeBudget, "note", lambda self, metrics: paid.append(metrics.get("training/global_step")))
    folder = tmp_path / "run"
    train(tiny.config(folder, f"trainer.rollout_data_dir={tmp_path / 'dumps'}"))
    assert f"from {folder}/global_step_3" in logged(caplog)[0]
    assert steps(folder) == [each for each in paid if each] == [1, 2, 3, 4, 5, 6]
    assert accounts(folder) == accounts(whole)


def test_prompts_in_flight_are_rolled_out_again(tiny, tmp_path, monkeypatch):
    loses(monkeypatch, 2, 3, method="_expand")
    folder = tmp_path / "run"
    train(tiny.config(folder, *ASYNC, "trainer.max_staleness=3", slow_tool(tmp_path / "tool", 0.02)))
    assert sorted(trained(folder)) == plan(6)
    assert steps(folder) == [1, 2, 3, 4, 5, 6]


def test_a_run_that_gets_no_further_ends_in_one_line_and_resumes(tiny, tmp_path, whole, monkeypatch, capsys, pauses):
    loses(monkeypatch, 2, 2, 2)
    arguments = ["train", *tiny.arguments(tmp_path / "run", "trainer.save_freq=1", "trainer.max_restarts=2")]
    capsys.readouterr()
    assert run_command(cli, arguments) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("error: ")] == [f"error: {LOST}"]
    assert pauses == [1, 2]
    train(tiny.config(tmp_path / "run"))
    assert same(weights(tmp_path / "run", 6), weights(whole, 6))


def test_what_is_no_loss_and_what_fails_at_the_start_is_not_tried_again(tiny, tmp_path, monkeypatch, pauses):
    loses(monkeypatch, 1, error=InfrastructureError("the server is down"))
    with pytest.raises(InfrastructureError, match="the server is down"):
        train(tiny.config(tmp_path / "one"))
    monkeypatch.setattr(run, "prepare", lambda *given, **kwargs: (_ for _ in ()).throw(LOST))
    with pytest.raises(WorkerLost):
        train(tiny.config(tmp_path / "two"))
    assert pauses == []


def test_nodes_that_do_not_answer_yet_are_asked_again_and_those_that_are_gone_end_the_run(
    tiny, tmp_path, monkeypatch, pauses
):
    begin, told = run.prepare, []
    answers = [None, InfrastructureError("a node does not answer"), WorkerLost("a process did not start"), None]
    answers += [ConfigError("the cluster has 1 CPU")]

    def prepare(config, *, restarts):
        told.append(restarts)
        if (error := answers.pop(0)) is not None:
            raise error
        return begin(config, restarts=restarts)

    monkeypatch.setattr(run, "prepare", prepare)
    begun, open_trainer = [], PPOTrainer.__init__

    def opened(self, *given):
        gc.collect()
        assert not any(each() for each in begun)  # the ones before hold no rows any more
        begun.append(weakref.ref(self))
        open_trainer(self, *given)

    monkeypatch.setattr(PPOTrainer, "__init__", opened)
    loses(monkeypatch, 2, 3)
    with pytest.raises(WorkerLost) as ended:
        train(tiny.config(tmp_path / "run", "trainer.save_freq=1"))
    assert str(ended.value) == (
        f"{LOST}; the workers cannot start again: the cluster has 1 CPU; the same command resumes the run"
    )
    assert told == [False, True, True, True, True]
    assert len(begun) == 2
    assert pauses == [1, 2, 4, 1]


def test_a_signal_ends_a_run_that_then_loses_a_worker(tiny, tmp_path, monkeypatch, pauses):
    loses(monkeypatch, 0)
    update = PPOTrainer._update_actor

    def signalled(self, batch):
        os.kill(os.getpid(), signal.SIGINT)
        return update(self, batch)

    monkeypatch.setattr(PPOTrainer, "_update_actor", signalled)
    with pytest.raises(Interrupted, match=r"died in update_actor.*; the same command resumes the run"):
        train(tiny.config(tmp_path / "run", "trainer.max_restarts=3", "trainer.total_training_steps=2"))
    assert pauses == []


def test_fine_tuning_goes_on_too(tiny, tmp_path, monkeypatch, caplog):
    def tuned(folder):
        settings = [f"data.train_files={tiny.folder}/by_heart.parquet", f"model.path={tiny.model}", *SFT]
        return fine_tune(compose("sft", [*settings, f"trainer.default_local_dir={folder}"], root="sft"))

    tuned(tmp_path / "whole")
    loses(monkeypatch, 3, method="_update", trainer=SFTTrainer)
    result = tuned(tmp_path / "run")
    assert f"from {tmp_path}/run/global_step_2 (trainer.max_restarts: 1 of 1)" in logged(caplog)[0]
    assert same(*(load_file(folder / "model.safetensors") for folder in (result, tmp_path / "whole" / "huggingface")))
    assert steps(tmp_path / "run") == [1, 2, 3, 4]


def test_no_memory_left_is_one_line_and_the_run_resumes(tiny, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        loses(patch, 1, error=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        said = one_line_error(capsys, ["train", *tiny.arguments(tmp_path / "run", "trainer.save_freq=1")])
    assert said.startswith("out of memory: OutOfMemoryError: CUDA out of memory.")
    assert said.endswith("; the same command resumes the run")
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "1"
    train(tiny.config(tmp_path / "run", "trainer.total_training_steps=2"))
    assert sorted(trained(tmp_path / "run")) == plan(2)
    with pytest.raises(RuntimeError, match="can't allocate memory") as on_a_cpu:
        torch.empty(1 << 60)
    assert is_out_of_memory(on_a_cpu.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape"))
