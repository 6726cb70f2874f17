"""`etude train`, `eval` and their other doors: the same program, and quick to answer what is wrong."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from house_stage import one_line_error

import etude
from etude.cli.main import cli, run
from etude.dumps import read_rollouts
from etude.trainer import run as runs

ROOT = Path(etude.__file__).parents[1]

GEO3K = """
data:
  train_files: [/data/train.parquet]
actor_rollout_ref:
  rollout:
    tool_config: config/tool_config/geo3k_tool_config.yaml
    multi_turn: {enable: true, max_assistant_turns: 5}
reward_model:
  enable: false
"""


@pytest.fixture
def started(monkeypatch):
    """The configurations that runs were started with, instead of running them."""
    configs = []
    monkeypatch.setattr(runs, "train", lambda config, emit: configs.append(config))
    compose_module = sys.modules["etude.config.compose"]
    for name in ("start_problems", "start_remarks"):  # the documents' files are not here
        monkeypatch.setattr(compose_module, name, lambda *settings: ())
    return configs


def through_module(monkeypatch, module, *arguments):
    """The exit status of `python -m module arguments…`."""
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    return ended.value.code


def test_the_modules_of_the_documents_are_etude_train(started, monkeypatch):
    line = ["algorithm.adv_estimator=grpo", "data.train_files=/data/train.parquet", "data.train_batch_size=1024"]
    assert through_module(monkeypatch, "etude.trainer.main_ppo", *line) == 0
    assert run(cli, ["train", *line]) == 0
    first, second = started
    assert first == second
    assert first.data.train_batch_size == 1024


def test_main_grpo_has_grpo_defaults(started, monkeypatch):
    assert through_module(monkeypatch, "etude.trainer.main_grpo") == 0
    assert through_module(monkeypatch, "etude.trainer.main_ppo") == 0
    assert [config.algorithm.adv_estimator for config in started] == ["grpo", "gae"]


def test_the_documents_command_with_a_file_of_the_users(started, monkeypatch, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "geo3k_multiturn_megatron_grpo.yaml").write_text(GEO3K, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    line = ["--config-name", "geo3k_multiturn_megatron_grpo", 'data.train_files=["/data/mine.parquet"]']
    assert through_module(monkeypatch, "etude.trainer.main_grpo", *line) == 0
    [config] = started
    assert config.algorithm.adv_estimator == "grpo"
    assert config.data.train_files == ("/data/mine.parquet",)
    assert config.actor_rollout_ref.rollout.multi_turn.tool_config_path == (
        "config/tool_config/geo3k_tool_config.yaml",
    )


@pytest.mark.parametrize("door", ["etude.trainer.main_ppo", "etude.trainer.main_grpo"])
def test_a_wrong_key_through_any_door_is_one_line(monkeypatch, capsys, door):
    assert through_module(monkeypatch, door, "trainer.sed=3") == 2
    first, *problems = capsys.readouterr().err.splitlines()
    assert first == "error: 3 settings are invalid:"  # the data and the model are missing, too
    assert problems[0] == "  unknown key trainer.sed (command line); did you mean trainer.seed?"


def test_an_evaluation_tells_writes_and_dumps(tiny, tmp_path, capsys):
    out = tmp_path / "deep" / "figures.json"
    arguments = tiny.arguments(tmp_path / "run", f"data.val_files={tiny.folder}/data/test.parquet")
    assert run(cli, ["eval", "--output", str(out), "--dump", str(tmp_path / "dump"), *arguments]) == 0
    shown = capsys.readouterr().out
    figures = json.loads(out.read_text())
    records = list(read_rollouts(tmp_path / "dump" / "0.jsonl"))
    assert figures["samples"] == len(records) == 3
    assert figures["dropped"] == 0
    assert figures["reward"] == pytest.approx(sum(record["score"] for record in records) / 3)
    assert 0 <= figures["success_low"] <= figures["success"] <= figures["success_high"] <= 1
    [(source, own)] = figures["sources"].items()
    assert own == {key: value for key, value in figures.items() if key not in ("sources", "metrics", "folder")}
    assert shown.startswith(f"{source}: success {figures['success']:.3f} (95 % interval ")
    assert f"tool use {figures['tool_use']:.3f} (95 % interval {figures['tool_use_low']:.3f} to" in shown
    core = figures["metrics"][f"val-core/{source}/reward/mean@1"]
    assert figures["reward"] == pytest.approx(core)
    assert shown.splitlines()[1:] == [f"trajectories: {tmp_path}/dump/0.jsonl"]
    assert not (tmp_path / "run").exists()


def test_an_evaluation_of_several_samples_must_sample(tiny, tmp_path, capsys):
    val = "actor_rollout_ref.rollout.val_kwargs"
    arguments = tiny.arguments(tmp_path, f"data.val_files={tiny.folder}/data/test.parquet", f"{val}.n=2")
    for more in ((), (f"{val}.do_sample=true", f"{val}.temperature=0")):
        error = one_line_error(capsys, ["eval", *arguments, *more])
        assert "val_kwargs.n=2 (command line): without sampling, all answers are the same" in error
    assert run(cli, ["eval", *arguments, f"{val}.do_sample=true"]) == 0
    shown = capsys.readouterr().out
    assert "3 prompts, 6 samples, 0 dropped" in shown
    assert "  pass@2 0." in shown or "  pass@2 1." in shown
    [folder] = (tmp_path).glob("eval-*")
    assert (folder / "0.jsonl").is_file()
    capsys.readouterr()
    assert run(cli, ["eval", "--json", *arguments, f"{val}.do_sample=true"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["samples"], again["folder"]) == (6, str(folder))
    assert run(cli, ["runs", "show", str(folder)]) == 0
    assert "eval" in capsys.readouterr().out


def test_a_greedy_evaluation_is_the_same_every_time(tiny, tmp_path):
    arguments = tiny.arguments(tmp_path, f"data.val_files={tiny.folder}/data/test.parquet")
    for name in "ab":
        assert run(cli, ["eval", "--dump", str(tmp_path / name), *arguments]) == 0
    first, second = (list(read_rollouts(tmp_path / name / "0.jsonl")) for name in "ab")
    assert [record["response_ids"] for record in first] == [record["response_ids"] for record in second]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["arithmetic", "--train", "-1"], "cannot make -1 rows of 'train'"),
        (["gsm8k", "--input", "/nowhere"], "/nowhere"),
    ],
)
def test_data_that_cannot_be_made_is_one_line(tmp_path, capsys, arguments, wanted):
    assert wanted in one_line_error(capsys, ["data", *arguments, "--output-dir", tmp_path / "data"])
    assert not (tmp_path / "data").exists()
