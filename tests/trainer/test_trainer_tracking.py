"""Tracking: nothing is lost on resume, a foreign failure is one warning, names are checked."""

import json
import logging
import os
import re
import sqlite3
import subprocess
import sys
import threading
import types
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, DataError, EtudeError, MissingExtraError
from etude.run_folder import read_metrics
from etude.trainer import tracking as tracking_module
from etude.trainer.tracking import TRACKERS, Tracking
from etude.trainer.validation_metrics import Sample, validation_metrics


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_one_object_a_step_is_on_disk_at_once(tmp_path: Path) -> None:
    tracking = Tracking(["console", "jsonl"], tmp_path / "run", "e")
    tracking.log({"a": 1.0, "b": float("nan")}, 1)
    assert lines(tmp_path / "run") == [{"step": 1, "a": 1.0, "b": None}]
    tracking.log({"a": 2.0}, 2)
    assert [record["step"] for record in lines(tmp_path / "run")] == [1, 2]
    tracking.close()
    tracking.close()


@given(logged=st.integers(1, 8), checkpoint=st.integers(1, 8), torn=st.booleans())
def test_resume_gives_the_history_of_an_unbroken_run(
    tmp_path_factory, logged: int, checkpoint: int, torn: bool
) -> None:
    run = tmp_path_factory.mktemp("run")
    checkpoint = min(checkpoint, logged)
    first = Tracking(["jsonl"], run, "e")
    for step in range(1, logged + 1):
        first.log({"a": float(step)}, step)
    if torn:  # killed in the middle of a line
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 99, "a"')
    second = Tracking(["jsonl"], run, "e", resume_step=checkpoint)
    for step in range(checkpoint + 1, 10):
        second.log({"a": float(step)}, step)
    second.close()
    first.close()
    assert lines(run) == [{"step": step, "a": float(step)} for step in range(1, 10)]


def test_a_fresh_start_moves_an_earlier_file_aside(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        tracking = Tracking(["jsonl"], tmp_path, "e")
        tracking.log({"a": value}, 1)
        tracking.close()
    assert lines(tmp_path) == [{"step": 1, "a": 3.0}]
    assert json.loads((tmp_path / "metrics.1.jsonl").read_text())["a"] == 1.0
    assert json.loads((tmp_path / "metrics.2.jsonl").read_text())["a"] == 2.0


def test_unknown_names_give_the_nearest_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        Tracking(["jsonl", "tensorbord"], tmp_path / "run", "e")
    assert not (tmp_path / "run").exists()


def test_a_single_name_need_not_be_a_list(tmp_path: Path) -> None:
    tracking = Tracking("jsonl", tmp_path, "e")
    tracking.log({}, 1)
    tracking.close()
    assert lines(tmp_path) == [{"step": 1}]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio", "clearml"])
def test_an_absent_extra_names_the_pip_line(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"etude\[{name}\]"):
        Tracking([name], tmp_path, "e")


def test_metrics_file_that_cannot_be_written_is_an_error_naming_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EtudeError, match=r"file/metrics\.jsonl"):
        Tracking(["jsonl"], tmp_path / "file", "e")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_stops_the_run_and_names_the_file(tmp_path: Path) -> None:
    tracking = Tracking(["jsonl"], tmp_path, "e")
    tracking._trackers["jsonl"]._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(EtudeError, match=r"metrics\.jsonl.*No space"):
        tracking.log({"a": 1.0}, 1)


class Failing:
    """A tracker whose network is down; records what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def log(self, metrics: dict, step: int) -> None:
        self.asked.append(step)
        raise ConnectionError("no route to host")

    def close(self) -> None:
        raise ConnectionError("no route to host")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    tracker = Failing()
    monkeypatch.setitem(TRACKERS._items, "failing", lambda run_dir, experiment, resume_step: tracker)
    return tracker


def test_a_failing_tracker_warns_once_and_the_others_go_on(tmp_path, failing, caplog) -> None:
    tracking = Tracking(["failing", "jsonl"], tmp_path, "e")
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            tracking.log({"a": 1.0}, step)
        tracking.close()
    assert failing.asked == [1, 2, 3]
    assert [record["step"] for record in lines(tmp_path)] == [1, 2, 3]
    assert len(caplog.records) == 1
    assert "'failing'" in caplog.text


def test_a_tracker_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(run_dir: Path, experiment: str, resume_step: int) -> None:
        raise RuntimeError("api key\nnot configured")

    monkeypatch.setitem(TRACKERS._items, "failing", start)
    with pytest.raises(ConfigError, match="'failing' cannot start: RuntimeError: api key not configured"):
        Tracking(["jsonl", "failing"], tmp_path, "e")


def test_tensorboard_hides_the_steps_that_are_run_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = Tracking(["tensorboard"], tmp_path, "e")
    for step in (1, 2, 3):
        first.log({"a": 1.0}, step)
    first.close()
    second = Tracking(["tensorboard"], tmp_path, "e", resume_step=1)
    second.log({"a": 2.0}, 2)
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(1, 1.0), (2, 2.0)]
    afresh = Tracking(["tensorboard"], tmp_path, "e")
    afresh.log({"a": 3.0}, 0)
    afresh.close()
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(0, 3.0)]


class Stuck:
    """A tracker that never answers."""

    def __init__(self) -> None:
        self.entered, self.free = threading.Event(), threading.Event()

    def log(self, metrics: dict, step: int) -> None:
        self.entered.set()
        self.free.wait(60)

    def close(self) -> None:
        pass


def test_a_tracker_that_hangs_holds_nothing_up_and_warns_once(tmp_path, monkeypatch, caplog) -> None:
    tracker = Stuck()
    monkeypatch.setitem(TRACKERS._items, "stuck", lambda run_dir, experiment, resume_step: tracker)
    monkeypatch.setattr(tracking_module, "_MAX_QUEUED", 4)
    monkeypatch.setattr(tracking_module, "_CLOSE_SECONDS", 0.05)
    tracking = Tracking(["stuck", "jsonl"], tmp_path, "e")
    with caplog.at_level(logging.WARNING):
        tracking.log({"a": 0.0}, 0)
        assert tracker.entered.wait(60)
        for step in range(1, 20):
            tracking.log({"a": 1.0}, step)
        tracking.close()
    assert [record["step"] for record in lines(tmp_path)] == list(range(20))
    assert [record.message for record in caplog.records] == [
        "logger 'stuck' failed and may miss steps from here on: it is 4 steps behind"
    ]
    tracker.free.set()


def test_a_tracker_that_does_not_start_in_time_is_one_line(tmp_path, monkeypatch) -> None:
    held = threading.Event()
    monkeypatch.setitem(TRACKERS._items, "stuck", lambda run_dir, experiment, resume_step: held.wait(60))
    monkeypatch.setattr(tracking_module, "_START_SECONDS", 0.05)
    with pytest.raises(ConfigError, match="'stuck' cannot start: TimeoutError"):
        Tracking(["stuck"], tmp_path, "e")
    held.set()


def test_verls_name_for_the_file_is_the_same_file(tmp_path) -> None:
    tracking = Tracking(["file", "jsonl"], tmp_path, "e")
    tracking.log({"a": 1.0}, 1)
    tracking.close()
    assert lines(tmp_path) == [{"step": 1, "a": 1.0}]


SESSION = """
import sys
from pathlib import Path
from etude.trainer.tracking import Tracking
name, run = sys.argv[1], Path(sys.argv[2])
for resume in (0, 2):
    tracking = Tracking([name], run, "project/e", resume)
    for step in (resume + 1, resume + 2):
        tracking.log({"actor/loss": step / 2, "val-core/a/reward/mean@1": 0.5}, step)
    tracking.close()
"""


class FileStore:
    """Writes metrics as MLflow's file store does: into a file of the name."""

    folder = Path()

    def log_metric(self, run_id: str, name: str, value: float, step: int) -> None:
        path = self.folder / name
        if re.search(r"[^/\w.\- :]", name) or os.path.normpath(name) != name:
            raise ValueError(f"Invalid value {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(value))

    def get_experiment_by_name(self, name: str) -> None: ...
    def create_experiment(self, name: str) -> str: ...
    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id="1"))


def test_mlflow_keeps_metrics_in_files_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStore, "folder", tmp_path / "store")
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(tracking=SimpleNamespace(MlflowClient=FileStore)))
    right, wrong = Sample(1.0, 1.0, 0.0), Sample(0.0, 0.0, 0.0)
    found = validation_metrics({"a": [[right, wrong], [right, right]]}) | {
        "reward/spread/a": 1.0,
        "reward/spread/a/b/c": 2.0,
        "env/openenv:ws://127.0.0.1:8/episodes": 3.0,
        "val-core/MATH (hard)/reward/mean@1": 4.0,
    }
    tracker = TRACKERS.get("mlflow")(tmp_path, "e", 1)
    tracker.log(found, 1)
    files = {str(path.relative_to(tmp_path / "store")) for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert len(files) == len(found) >= 6
    assert {"val-core/a/reward/mean_at_2", "val-core/a/reward/mean_at_2_ci95_low", "reward/spread/a_b/c"} <= files
    assert {"env/openenv:ws:/_/127.0.0.1:8/episodes", "val-core/MATH _hard_/reward/mean_at_1"} <= files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio", "clearml"])
def test_a_resumed_run_is_one_run_in_the_real_package_offline(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name, reason=f"pip install etude[{name}]")
    run = tmp_path / "project" / "run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("trainer: {seed: 5}\n")
    places = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "SWANLAB_MODE": "offline",
        "TRACKIO_DIR": f"{tmp_path}/trackio",
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": f"{tmp_path}/clearml",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SESSION, name, str(run)],
        env=os.environ | places,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "may miss steps" not in done.stderr
    kept = FOUND[name](tmp_path)
    assert kept == ([0.5, 1.0, 1.5, 2.0] if name in ("mlflow", "trackio", "clearml") else 1 if name == "wandb" else 2)


def _of_database(path: Path, query: str) -> list[float]:
    with closing(sqlite3.connect(path)) as database:
        return [value for (value,) in database.execute(query)]


def _of_clearml(folder: Path) -> list[float]:
    [path] = folder.rglob("metrics.jsonl")
    batches = [json.loads(line) for line in path.read_text().splitlines()]
    events = [event for batch in batches for event in (batch if isinstance(batch, list) else [batch])]
    return [event["value"] for event in events if event.get("variant") == "loss"]


FOUND = {
    "wandb": lambda folder: len({path.stem for path in folder.rglob("*.wandb")}),
    "swanlab": lambda folder: len({path.stem for path in folder.rglob("*.swanlab")}),  # offline, each start is a run
    "mlflow": lambda folder: _of_database(
        folder / "mlflow.db", "select value from metrics where key = 'actor/loss' order by step"
    ),
    "trackio": lambda folder: _of_database(
        folder / "trackio" / "project.db", "select json_extract(metrics, '$.actor/loss') from metrics order by step"
    ),
    "clearml": _of_clearml,
}


def test_wandb_continues_its_own_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is not installed; this holds our side of its contract."""
    asked: list[dict] = []
    run = types.SimpleNamespace(id="abc", log=lambda metrics, step: asked.append({"step": step} | metrics), finish=int)
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: asked.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resume_step in (0, 5):
        tracking = Tracking(["wandb"], tmp_path / "project" / "run", "e", resume_step)
        tracking.log({"a": 1.0}, resume_step + 1)
        tracking.close()
    assert [(entry.get("project"), entry.get("id")) for entry in asked if "project" in entry] == [
        ("project", None),
        ("project", "abc"),
    ]
    assert [entry["step"] for entry in asked if "step" in entry] == [1, 6]


def test_reading_merges_steps_and_leaves_out_cut_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "a": 1}\n{"step": 1}\n[]\n{"step": 2, "b": 3}\n{"step": 3, "a"')
    assert read_metrics(path) == [{"step": 1}, {"step": 2, "a": 1, "b": 3}]
    with pytest.raises(DataError, match=r"none\.jsonl"):
        read_metrics(tmp_path / "none.jsonl")
