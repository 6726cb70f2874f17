"""Runs in folders: found within bounds, their state read without touching them, their configurations compared."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from etude.errors import DataError
from etude.run_folder import is_locked, read_config, run_lock, run_record
from etude.trainer.interrupts import Interrupted, Interrupts
from etude.viewer import runs
from etude.viewer.runs import MISSING, Difference, diff_configs, find_runs, read_run

HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


def make(folder: Path, *records: dict, **run: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {"seed": 1}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    if run:
        (folder / "run.json").write_text(json.dumps(run))
    return folder


def test_runs_are_found_and_what_they_hold_is_not_searched(tmp_path, monkeypatch):
    for name in ("b", "a", "a/warm_up", "deep/1/2/3/4/5", "deep/1/2/3/4/5/6"):
        make(tmp_path / name)
    for name in ("a/global_step_3/actor", "a/rollouts/x", ".hidden", "no_run"):
        (tmp_path / name).mkdir(parents=True)
    make(tmp_path / "a" / "validation" / "not_searched")
    (tmp_path / "link").symlink_to(tmp_path)
    found = [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)]
    assert found == ["a", "a/warm_up", "b", "deep/1/2/3/4/5"]
    assert next(iter(find_runs(tmp_path / "a"))) == tmp_path / "a"
    monkeypatch.setattr(runs, "MAX_FOLDERS", 2)
    assert len(list(find_runs(tmp_path))) == 1


def test_how_a_run_stands(tmp_path):
    steps = [{"step": n, "reward/total/mean": n / 10, "val-core/gsm8k/reward/mean@1": 0.5} for n in (1, 2, 3)]
    run = make(tmp_path / "run", *steps, {"step": 4, "reward/total/mean": None, "x": 1})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    assert read_run(run).status == "unknown"
    with run_record(run, {"kind": "train", "total_steps": 9, "started": "2026-01-02T03:04:05+00:00"}):
        assert read_run(run).status == "killed"  # no process holds its lock
    done = read_run(run)
    assert (done.status, done.kind, done.step, done.total_steps) == ("ended", "train", 4, 9)
    assert done.validation == {"val-core/gsm8k/reward/mean@1": 0.5}
    assert done.started is not None
    assert done.started.year == 2026
    with run_record(run, {"started": "2026-05-06T07:08:09+00:00"}, resumed=True):
        assert read_run(run).started == done.started
    assert read_run(run).record["resumed"].startswith("2026-05")
    with pytest.raises(OSError), run_record(run):
        raise OSError("disk\nfull")
    assert (read_run(run).status, read_run(run).why) == ("failed", "disk full")
    stopped = Interrupts().stopped(4, 9, run)
    with pytest.raises(Interrupted), run_record(run):
        raise stopped
    assert (read_run(run).status, read_run(run).why) == ("stopped", str(stopped))
    with pytest.raises(KeyboardInterrupt), run_record(run):  # of an evaluation
        raise KeyboardInterrupt
    assert (read_run(run).status, read_run(run).why) == ("stopped", "stopped")
    with pytest.raises(DataError, match=r"no run's folder"):
        read_run(tmp_path)


def test_the_step_of_a_run_that_kept_no_metrics_is_that_of_its_checkpoint(tmp_path):
    """As verl's `trainer.logger: [console, wandb]` leaves it."""
    run = make(tmp_path / "run", kind="train", ended="completed", total_steps=12)
    (run / "metrics.jsonl").unlink()
    assert read_run(run).step == 0
    (run / "latest_checkpointed_iteration.txt").write_text("12")
    assert (read_run(run).status, read_run(run).step) == ("ended", 12)


def test_a_run_is_running_while_a_process_holds_its_lock_and_looking_does_not_release_it(tmp_path):
    run = make(tmp_path / "run", ended=None)
    assert not is_locked(run)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        assert [read_run(run).status for _ in range(2)] == ["running", "running"]
        holder.communicate("\n", timeout=60)
    assert read_run(run).status == "killed"


def test_a_killed_run_whose_process_id_is_this_ones_is_killed(tmp_path):
    process = {"pid": os.getpid(), "host": platform.node()}  # as in a container that was started again
    run = make(tmp_path / "run", ended=None, process=process)
    (run / ".lock").write_text("process 1 on host")
    assert read_run(run).status == "killed"
    with run_lock(run):
        assert [read_run(run).status for _ in range(2)] == ["running", "running"]
        take = f"import fcntl; fcntl.lockf(open({str(run / '.lock')!r}, 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        refused = subprocess.run([sys.executable, "-c", take], check=False, capture_output=True)
        assert b"BlockingIOError" in refused.stderr  # looking did not release it
    assert read_run(run).status == "killed"


def test_the_last_metrics_come_from_the_end_of_a_long_file(tmp_path):
    filler = "x" * 1000
    run = make(tmp_path / "run", *({"step": n, "reward/total/mean": float(n), "y": filler} for n in range(1, 600)))
    assert (read_run(run).step, read_run(run).reward) == (599, 599.0)


@pytest.mark.parametrize("text", ["[1]", "a: [", "x" * (2**20 + 1), "\x00", "&a [*a, *a"])
def test_a_configuration_that_is_none_is_an_error_naming_it(tmp_path, text):
    run = make(tmp_path / "run")
    (run / "config.yaml").write_text(text)
    with pytest.raises(DataError, match=r"config\.yaml"):
        read_config(run)


def test_configurations_are_compared_key_by_key():
    left = {"a": {"b": 1, "same": [1, 2]}, "gone": {}, "c": None}
    right = {"a": {"b": 2, "same": [1, 2]}, "c": None, "new": {"d": False}}
    assert diff_configs(left, right) == [
        Difference("a.b", 1, 2),
        Difference("new.d", MISSING, False),
        Difference("gone", {}, MISSING),
    ]
    assert diff_configs(left, left) == []
