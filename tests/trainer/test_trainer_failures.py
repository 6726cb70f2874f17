"""What breaks: disks, tools, scorers. One line each, nothing half-written, and never a reward."""

import subprocess

import pytest
from async_stage import plan, trained
from house_stage import Launched, metrics, one_line_error, same, steps, weights
from safetensors.torch import load_file
from trainer_tools import Moody

from etude.agents import SingleTurnAgentLoop, register
from etude.errors import EtudeError, InfrastructureError, TrainingStopped
from etude.trainer import ppo
from etude.trainer.rollouts import first_cause
from etude.trainer.run import evaluate, train
from etude.trajectory import Rollout, StopReason

RETRIES = "actor_rollout_ref.rollout.infrastructure_retries"


@register("loses_each_first")
class LosesEachFirst(SingleTurnAgentLoop):
    async def run(self, sampling_params, **row):
        if row["rollout_index"] % 2 == 0:
            raise InfrastructureError("gone")
        return await super().run(sampling_params, **row)


@pytest.fixture
def small_disk(tmp_path, request):
    """A disk with room for one checkpoint and a half, or for as many KiB as the test asks."""
    folder, size = tmp_path / "disk", getattr(request, "param", 1900)
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=False)


def test_a_full_disk_is_one_line_and_the_earlier_checkpoint_stays(tiny, tmp_path, small_disk):
    run = small_disk / "run"
    settings = (
        "trainer.save_freq=1",
        f"trainer.rollout_data_dir={tmp_path}/rollouts",
        "trainer.max_actor_ckpt_to_keep=null",
    )
    launched = Launched(["train", *tiny.arguments(run, *settings)], tmp_path / "log")
    assert launched.wait() == 2
    warned, line = launched.text().splitlines()
    assert "disk: a checkpoint takes about" in warned
    assert line.startswith(f"error: cannot write {run}/global_step_2: ")
    assert "0.0 MiB free" in line or "0.1 MiB free" in line or "0.2 MiB free" in line
    assert line.endswith("; free space or set trainer.default_local_dir")
    assert not list(run.glob(".incomplete*"))
    assert not (run / "global_step_2").exists()
    train(tiny.config(tmp_path / "whole"))
    moved = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run}/global_step_1")
    train(tiny.config(tmp_path / "elsewhere", *moved))
    assert same(weights(tmp_path / "elsewhere", 6), weights(tmp_path / "whole", 6))


@pytest.mark.parametrize("small_disk", [28, 200], indirect=True)
def test_every_line_of_a_full_disk_names_a_file_or_folder(tiny, tmp_path, small_disk):
    run = small_disk / "run"
    launched = Launched(["train", *tiny.arguments(run, "trainer.logger=[tensorboard,jsonl]")], tmp_path / "log")
    assert launched.wait() == 2
    *warnings, last = launched.text().splitlines()
    assert all(line.startswith("WARNING etude.") and str(small_disk) in line for line in warnings), warnings
    assert last.startswith(f"error: cannot write {run}/")


@pytest.mark.parametrize("small_disk", [100], indirect=True)
def test_no_room_for_a_dump_is_one_line_and_every_prompt_is_accounted_for(tiny, tmp_path, small_disk, capsys):
    run, dumps = tmp_path / "run", "trainer.rollout_data_dir"
    line = one_line_error(capsys, ["train", *tiny.arguments(run, f"{dumps}={small_disk}")])
    failed = int(line.removeprefix(f"cannot write {small_disk}/").partition(".")[0])
    assert line.endswith("; check folder and disk space")
    assert (run / "latest_checkpointed_iteration.txt").read_text() == str(failed)
    left = sorted(path.name for path in small_disk.iterdir())
    assert left == [f"{step}.jsonl" for step in range(1, failed)]  # none in part
    train(tiny.config(run, f"{dumps}={tmp_path}/elsewhere"))
    assert sorted(trained(run)) == plan(6)


def test_a_folder_that_cannot_be_made_is_one_line(tiny, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert f"{tmp_path / 'file'} is a file, not a folder" in one_line_error(
        capsys, ["train", *tiny.arguments(tmp_path / "file" / "run")]
    )


def test_too_many_losses_stop_the_run_with_a_checkpoint_and_the_cause(tiny, tmp_path):
    tool = Moody(tmp_path / "tool", 'raise ConnectionError("the sum server is down")')
    run = tmp_path / "run"
    with pytest.raises(TrainingStopped) as stopped:
        train(tiny.config(run, tool.override, f"{RETRIES}=1", "trainer.min_valid_fraction=0.99"))
    assert "trajectories were dropped after failures of infrastructure" in str(stopped.value)
    assert "the sum server is down" in str(stopped.value)
    assert steps(run) == [1]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert tool.count("release") == tool.count("create") > 16  # the lost ones were tried again


def test_a_tool_that_always_times_out_is_never_a_reward(tiny, tmp_path, capsys):
    tool = Moody(tmp_path / "tool", "await asyncio.sleep(60)", good=0, timeout=0.05)
    settings = (tool.override, f"{RETRIES}=0", "trainer.min_valid_fraction=1")
    line = one_line_error(capsys, ["train", *tiny.arguments(tmp_path / "run", *settings)])
    assert "TimeoutError: no answer within 0.05 s (config.timeout)" in line
    assert not list((tmp_path / "run").glob("global_step*"))


def test_a_step_without_survivors_changes_nothing_and_is_counted(tiny, tmp_path):
    (tmp_path / "down.py").write_text("def compute_score(**kwargs):\n    raise ConnectionError('no judge')\n")
    settings = ("trainer.min_valid_fraction=0", f"{RETRIES}=0", "trainer.total_training_steps=2")
    train(tiny.config(tmp_path, *settings, f"custom_reward_function.path={tmp_path}/down.py"))
    assert [record["rollout/dropped"] for record in metrics(tmp_path)] == [8, 8]
    broken = [record["rollout/infrastructure_failures"] + record["rollout/given_up"] for record in metrics(tmp_path)]
    assert broken == [8, 8]
    assert not any("reward/total/mean" in record for record in metrics(tmp_path))
    assert same(weights(tmp_path, 2), load_file(tiny.model / "model.safetensors"))


def test_some_losses_are_survived(tiny, tmp_path):
    tool = Moody(tmp_path / "tool", "if int(instance_id) % 4 == 0: raise OSError('gone')", good=0)
    settings = (tool.override, f"{RETRIES}=0", "trainer.min_valid_fraction=0.1", "trainer.total_training_steps=2")
    train(tiny.config(tmp_path / "run", *settings))
    assert any(record["rollout/dropped"] > 0 for record in metrics(tmp_path / "run"))
    assert not same(weights(tmp_path / "run", 2), load_file(tiny.model / "model.safetensors"))


@pytest.mark.parametrize(("estimator", "given_up"), [("grpo", 2), ("gae", 0)])
def test_what_is_left_of_a_group_is_given_up_where_answers_are_compared(tiny, tmp_path, estimator, given_up):
    """One at a time, each group's first is lost before its second begins."""
    settings = (
        "actor_rollout_ref.rollout.agent.default_agent_loop=loses_each_first",
        "actor_rollout_ref.rollout.max_concurrent_trajectories=1",
        "actor_rollout_ref.rollout.n=2",
        f"algorithm.adv_estimator={estimator}",
        f"{RETRIES}=0",
        "trainer.total_training_steps=1",
    )
    train(tiny.config(tmp_path / "run", *settings, "trainer.min_valid_fraction=0"))
    [record] = metrics(tmp_path / "run")
    assert record["rollout/infrastructure_failures"] == 2
    assert (record["rollout/given_up"], record["rollout/dropped"]) == (given_up, 2 + given_up)
    if given_up:  # those count as lost, too
        with pytest.raises(TrainingStopped, match="4 of 4 trajectories were dropped"):
            train(tiny.config(tmp_path / "strict", *settings, "trainer.min_valid_fraction=0.5"))


def test_a_tool_that_raises_tells_the_model(tiny, tmp_path):
    tool = Moody(tmp_path / "tool", "1 / 0", good=0)
    train(tiny.config(tmp_path / "run", tool.override, "trainer.total_training_steps=1"))
    [record] = metrics(tmp_path / "run")
    assert record["tool/calculator/errors"] == record["tool/calculator/calls"] > 0
    assert record["rollout/dropped"] == 0


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_scorer_that_raises_ends_the_run_and_says_why(tiny, tmp_path, mode):
    (tmp_path / "odd.py").write_text("def compute_score(**kwargs):\n    raise KeyError('no such answer')\n")
    override = f"custom_reward_function.path={tmp_path}/odd.py"
    with pytest.raises(EtudeError, match="no such answer"):
        train(tiny.config(tmp_path / "run", override, f"actor_rollout_ref.rollout.mode={mode}", f"{RETRIES}=0"))


def test_a_fault_in_an_update_does_not_save_half_changed_weights(tiny, tmp_path, monkeypatch):
    update = ppo.PPOTrainer._update_actor

    def fails_in_the_third(self, batch):
        figures = update(self, batch)
        if self.global_step == 2:
            raise ZeroDivisionError
        return figures

    monkeypatch.setattr(ppo.PPOTrainer, "_update_actor", fails_in_the_third)
    with pytest.raises(ZeroDivisionError):
        train(tiny.config(tmp_path, "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null"))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    with pytest.raises(ZeroDivisionError):
        train(tiny.config(tmp_path / "unsaved"))
    assert not list((tmp_path / "unsaved").glob("global_step*"))


def test_an_evaluation_without_survivors_is_an_error_and_not_a_zero(tiny, tmp_path):
    tool = Moody(tmp_path / "tool", 'raise OSError("gone")', good=0)
    (tmp_path / "down.py").write_text("def compute_score(**kwargs):\n    raise ConnectionError('no judge')\n")
    settings = (f"data.val_files={tiny.folder}/data/val.parquet", f"{RETRIES}=0", tool.override)
    config = tiny.config(tmp_path, *settings, f"custom_reward_function.path={tmp_path}/down.py")
    with pytest.raises(EtudeError, match=r"3 of 3 trajectories were dropped .*; the first cause: "):
        evaluate(config, output=tmp_path / "figures.json")
    assert not (tmp_path / "figures.json").exists()


def test_why_rollouts_were_dropped_is_said_without_a_failure_too():
    long, broken = Rollout(dropped=StopReason.PROMPT_TOO_LONG), Rollout(dropped=StopReason.INFRASTRUCTURE, cause="gone")
    assert first_cause([Rollout(), long]) == "prompt too long"
    assert first_cause([long, broken]) == "gone"
    assert first_cause([Rollout()]) == "none"


def test_an_evaluation_with_too_few_survivors_has_no_figures(tiny, tmp_path):
    """Two of three prompts lose their tool: what the third one says is no success rate."""
    (tmp_path / "judge.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if extra_info['index'] > 0:\n"
        "        raise ConnectionError('no judge')\n"
        "    return 1.0\n"
    )
    settings = (f"data.val_files={tiny.folder}/data/val.parquet", f"{RETRIES}=0")
    settings += (f"custom_reward_function.path={tmp_path}/judge.py",)
    with pytest.raises(EtudeError, match=r"2 of 3 trajectories were dropped .* trainer.min_valid_fraction=0.5 allows"):
        evaluate(tiny.config(tmp_path, *settings), output=tmp_path / "figures.json")
    assert not (tmp_path / "figures.json").exists()
    result = evaluate(tiny.config(tmp_path, *settings, "trainer.min_valid_fraction=0.3"))
    assert (result["samples"], result["dropped"], result["success"]) == (1, 2, 1.0)


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ("extra_info['anser']", "failed: KeyError: 'anser' ({0}:2); mend {0}:2"),
        ("'yes'", "returned a str where a number was expected as reward: 'yes'; let it return a number"),
        ("{}", "returned no score"),
    ],
)
def test_a_bug_in_a_users_reward_is_one_line_with_its_function_and_file(tiny, tmp_path, capsys, returned, why):
    reward = tmp_path / "reward.py"
    reward.write_text(f"def mine(data_source, solution_str, ground_truth, extra_info):\n    return {returned}\n")
    custom = (f"custom_reward_function.path={reward}", "custom_reward_function.name=mine")
    arguments = tiny.arguments(tmp_path / "run", *custom, f"{RETRIES}=0")
    error = one_line_error(capsys, ["train", *arguments])
    assert f"'mine' of {reward} for the data source 'etude/arithmetic' {why.format(reward)}" in error
    assert "Traceback" not in error
