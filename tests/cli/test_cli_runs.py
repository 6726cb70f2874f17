"""`etude runs` and `etude reproduce`: what runs are there, and whether one can be had again."""

import io
import json
import re
import shutil
import sys

import pytest
import torch
from house_stage import ACTOR, metrics, one_line_error, same, weights

from etude.cli.main import cli, run
from etude.run_folder import read_metrics, run_lock, run_totals, unit_costs
from etude.trainer.metrics import gain_costs
from etude.trainer.reproduce import compare_metrics
from etude.viewer import answers
from etude.viewer.runs import RunView


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory):
    """A tiny run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    assert run(cli, ["train", *tiny.arguments(folder, "trainer.total_training_steps=2")]) == 0
    return folder


def output(capsys, *arguments):
    capsys.readouterr()
    status = run(cli, [str(each) for each in arguments])
    return status, capsys.readouterr().out


def test_runs_are_listed_shown_and_compared(tiny, done, capsys):
    second = done.with_name("second")
    assert run(cli, ["train", *tiny.arguments(second, "trainer.total_training_steps=1", "trainer.seed=7")]) == 0
    status, listed = output(capsys, "runs", "list", done.parent)
    assert status == 0
    assert [line.split()[1:4] for line in listed.splitlines()[1:]] == [
        ["train", "ended", "2/2"],
        ["train", "ended", "1/1"],
    ]
    evaluated = [
        "eval",
        *tiny.arguments(done, f"data.val_files={tiny.folder}/data/train.parquet"),
        "data.val_max_samples=1",
        "--dump",
        done.parent / "evaluated",
    ]
    assert output(capsys, *evaluated)[0] == 0
    _, lines = output(capsys, "runs", "list", done.parent / "evaluated", "--json")
    assert json.loads(lines)["model"] == str(tiny.model)
    assert f"model                {tiny.model}\n" in output(capsys, "runs", "show", done.parent / "evaluated")[1]
    shutil.rmtree(done.parent / "evaluated")
    _, lines = output(capsys, "runs", "list", done.parent, "--json")
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [2, 1]
    _, shown = output(capsys, "runs", "show", done)
    assert f"{tiny.folder}/data/train.parquet (sha256 " in shown
    assert "trainer.seed=1" in shown
    record = json.loads(output(capsys, "runs", "show", done, "--json")[1])
    assert (record["status"], record["record"]["kind"]) == ("ended", "train")
    _, compared = output(capsys, "runs", "compare", done, second)
    assert "trainer.seed: 1 → 7" in compared
    lines = compared.splitlines()
    assert any(line.startswith("totals, CPU hours:  ") for line in lines)  # one cost a line, aligned
    assert "versions" not in compared
    assert "data.train_batch_size" not in compared


def test_a_validation_says_how_it_was_measured(tmp_path, capsys):
    """Of greedy single answers in one run, of four sampled ones in the other, which was resumed with other val_kwargs."""
    for name, sampled, steps in (("one", False, [("mean@1", 0.83)]), ("two", True, [("mean@1", 0.9), ("mean@4", 0.5)])):
        (tmp_path / name).mkdir()
        records = ({"step": n, f"val-core/shop/reward/{each}": value} for n, (each, value) in enumerate(steps, 1))
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
        kwargs = {"rollout": {"val_kwargs": {"do_sample": sampled, "temperature": 1.0}}}
        (tmp_path / name / "config.yaml").write_text(json.dumps({"actor_rollout_ref": kwargs}))
    _, compared = output(capsys, "runs", "compare", tmp_path / "one", tmp_path / "two")
    assert "shop mean@1 0.83 (greedy) → shop mean@4 0.5 (sampled)\n" in compared


def test_only_runs_that_do_not_run_are_removed_and_only_when_confirmed(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    assert "is no run's folder" in one_line_error(capsys, ["runs", "rm", "--yes", folder])
    (folder / "run.json").write_text('{"name": "another program"}')
    assert "is no run's folder" in one_line_error(capsys, ["runs", "rm", "--yes", folder])
    (folder / "run.json").write_text('{"ended": null}')
    (tmp_path / "link").symlink_to(folder)
    assert "is no run's folder" in one_line_error(capsys, ["runs", "rm", "--yes", tmp_path / "link"])
    assert "nothing was removed" in one_line_error(capsys, ["runs", "rm", "--yes", folder, tmp_path])
    (folder / "eval-1").mkdir()
    (folder / "eval-1" / "run.json").write_text('{"ended": null}')
    for running in (folder, folder / "eval-1"):
        with run_lock(running):
            assert f"{running} is running" in one_line_error(capsys, ["runs", "rm", "--yes", folder])
    for answer in ("", "\n", "n\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        run(cli, ["runs", "rm", str(folder)])
        assert folder.exists()
    assert run(cli, ["runs", "rm", "--yes", str(folder)]) == 0
    assert not folder.exists()


def test_a_run_is_reproduced_bit_for_bit_elsewhere(done, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    status, said = output(capsys, "reproduce", done, "--output", "nochmals ä")  # not in Hydra's grammar
    assert (status, said.splitlines()[-1]) == (0, "reproduced: the metrics of 2 steps are the same, bit for bit")
    assert [each.message for each in caplog.records if each.name.startswith("etude.config")] == []
    again = tmp_path / "nochmals ä"
    first, second = metrics(done), metrics(again)
    assert [each["actor/grad_norm"] for each in first] == [each["actor/grad_norm"] for each in second]
    assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in done.iterdir())


def test_the_first_steps_are_checked_and_what_differs_is_said(tiny, done, tmp_path, monkeypatch, capsys):
    shown = ("trainer.report=true", "trainer.logger=[console,jsonl]")
    status, said = output(capsys, "reproduce", done, "--check", "1", *shown)
    assert (status, said.splitlines()[-1]) == (0, "reproduced: the metrics of 1 steps are the same, bit for bit")
    assert "Ctrl-C" not in said  # nobody pressed it
    assert sorted(path.name for path in done.parent.iterdir() if path.name.startswith("first")) == ["first"]
    assert "report" not in said  # none is kept
    shutil.copytree(done, copy := tmp_path / "copy")
    for bits in ("true", "false"):
        config = re.sub("deterministic: (true|false)", f"deterministic: {bits}", (copy / "config.yaml").read_text())
        (copy / "config.yaml").write_text(config)
        assert run(cli, ["reproduce", str(copy), "--check", "1", "trainer.seed=7", "data.seed=9"]) == 1
        said = capsys.readouterr()
        assert "step 1: " in said.out
        assert ("bits are promised with trainer.deterministic=true" in said.err) == (bits == "false")


def test_changed_files_and_code_are_named_and_secrets_asked_for(done, tmp_path, capsys):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (copy / name).write_bytes((done / name).read_bytes())
    record = json.loads((done / "run.json").read_text())
    data = next(name for name, each in record["files"].items() if each["key"] == "data.train_files")
    record["files"][data]["sha256"] = "0"
    record["code"]["version"] = "0.0.0"
    (copy / "run.json").write_text(json.dumps(record))
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("init_kwargs: {}", "init_kwargs: {token: <redacted>}"))
    capsys.readouterr()
    torch.set_num_threads(2)  # the run says itself that it has one
    assert run(cli, ["reproduce", str(copy), "--check", "1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("differs: etude ")
    assert not any("differs: hardware" in line for line in lines)
    assert lines[-2] == f"differs: data.train_files: {data} is not what it was"
    assert "ray.init_kwargs.token=… again" in lines[-1]
    assert "in the run's own folder" in one_line_error(capsys, ["reproduce", done, "--output", done / "x"])


def test_figures_of_time_are_not_compared():
    then = [{"step": 0, "a": 1.0}, {"step": 1, "a": 1.0, "timing_s/gen": 1.0, "tool/x/latency_p50": 3, "gone": 2.0}]
    now = [
        {"step": 0, "a": 1.0},
        {"step": 1, "a": 1.0 + 2**-52, "timing_s/gen": 2.0, "tool/x/latency_p50": 4},
        {"step": 2},
    ]
    found = compare_metrics(then, now)
    assert (found.steps, found.differences) == (1, ((1, "a", 1.0, 1.0 + 2**-52), (1, "gone", 2.0, None)))
    assert compare_metrics(then, now, 0).differences == ()


def test_what_a_run_took_is_summed(done, capsys):
    record = json.loads((done / "run.json").read_text())
    totals, steps = record["totals"], metrics(done)
    assert totals["steps"] == 2
    assert totals["cpu_hours"] == pytest.approx(sum(each["perf/cpu_seconds"] for each in steps) / 3600, abs=1e-6)
    assert totals["cpu_hours"] > 0
    assert not {"gpu_hours", "joules"} & totals.keys() or torch.cuda.is_available()
    assert totals["tokens"] == sum(each["perf/total_num_tokens"] for each in steps)
    assert totals["tool_calls"] == sum(each.get("tool/calculator/calls", 0) for each in steps)
    shown = output(capsys, "runs", "show", done)[1]
    assert [line.split()[0] for line in shown.splitlines() if "CPU" in line] == ["totals", "per"]
    assert "CPU hours" in output(capsys, "runs", "list", done)[1].splitlines()[1]


def test_validations_are_told_apart_and_a_tools_own_metric_is_no_call(done, tmp_path, capsys):
    copied = shutil.copytree(done, tmp_path / "run")
    before = run_totals(read_metrics(copied / "metrics.jsonl"))
    means = {f"val-core/math/{name}/reward/mean@1": value for name, value in (("easy", 1.0), ("hard", 0.25))}
    with (copied / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "tool/search/metrics/calls": 40.0, **means}) + "\n")
    assert (
        "validation           math/easy mean@1 1, math/hard mean@1 0.25 (greedy)\n"
        in output(capsys, "runs", "show", copied)[1]
    )
    assert run_totals(read_metrics(copied / "metrics.jsonl")) == before | {"steps": 3.0}
    with (copied / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 4, "val-core/easy/reward/mean@1": 0.5, "val-core/easy/reward/missing": 3}) + "\n"
        )
    told = output(capsys, "runs", "show", copied)[1]
    assert "validation           easy mean@1 0.5, 3 answers of easy dropped (greedy)\n" in told
    with (copied / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "val-core/easy/reward/mean@1": 0.75}) + "\n")
    assert "validation           easy mean@1 0.75 (greedy)\n" in output(capsys, "runs", "show", copied)[1]


def test_a_point_of_success_costs_what_was_spent_between_the_validations(tmp_path):
    success = "val/reward/success/mean"
    steps = [
        {"step": 0, success: 0.25, "perf/cpu_seconds": 100.0},
        {"step": 1, "perf/cpu_seconds": 10.0, "perf/joules": 50.0, "reward/judge/cost": 1.0},
        {"step": 2, "perf/cpu_seconds": 20.0, "perf/joules": 150.0, success: 0.5},
        {"step": 3, "perf/cpu_seconds": 30.0},
    ]
    costs = unit_costs(steps)
    assert costs["point of success"] == {"cpu_seconds": 1.2, "joules": 8.0, "judge_cost": 0.04}
    assert costs["step"]["cpu_seconds"] == pytest.approx(160 / 3)
    assert "point of success" not in unit_costs([*steps, {"step": 4, success: 0.25}])
    lossy = {"step": 4, success: 0.75, "perf/cpu_seconds": 1.0, "val/rollout/dropped": 3.0}  # is of other questions
    assert unit_costs([*steps, lossy])["point of success"] == costs["point of success"]
    trained = [{"step": n, "perf/cpu_seconds": 10.0, "reward/success/mean": n / 10} for n in (1, 2, 3)]
    assert unit_costs(trained)["point of success"] == {"cpu_seconds": pytest.approx(1.0)}
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in steps[:2]))
    assert gain_costs(tmp_path, steps[2], 2)["perf/joules_per_point"] == 8.0


def test_judges_count_in_training_and_validation():
    steps = [
        {"step": 0, "val/reward/judge/cost": 0.5},
        {"step": 1, "reward/judge/cost": 1.0, "reward/judge/cached": 3.0},
    ]
    assert run_totals(steps) == {"steps": 1, "judge_cost": 1.5}


def test_a_run_goes_on_from_any_checkpoint_bit_for_bit_and_branches(tiny, tmp_path, capsys):
    first = tmp_path / "first"
    kept = ("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=-1")
    assert run(cli, ["train", *tiny.arguments(first, *kept)]) == 0
    status, said = output(capsys, "reproduce", first, "--from-step", "1")
    assert (status, said.splitlines()[-1]) == (0, "reproduced: the metrics of 2 steps are the same, bit for bit")
    again = tmp_path / "first-from-1"
    assert same(weights(again, 3), weights(first, 3))
    status, said = output(
        capsys, "reproduce", first, "--from-step", "2", "--output", tmp_path / "branch", f"{ACTOR}.optim.lr=1e-4"
    )
    assert (status, "branched at step 2" in said) == (0, True)
    record = json.loads((tmp_path / "branch" / "run.json").read_text())
    assert record["parent"] == {"run": str(first.resolve()), "step": 2}
    assert [(each["step"], each["actor/lr"]) for each in metrics(tmp_path / "branch")] == [(3, 1e-4)]
    assert "branch of: " in output(capsys, "runs", "compare", first, tmp_path / "branch")[1]
    views = [RunView(each.name, each) for each in (first, tmp_path / "branch")]
    assert answers.compare(*views)["branches"] == [f"branch is a branch of {first.resolve()}, step 2"]
    assert "has those of 1, 2, 3" in one_line_error(capsys, ["reproduce", first, "--from-step", "7"])
    assert "give another --output" in one_line_error(capsys, ["reproduce", first, "--from-step", "1"])
