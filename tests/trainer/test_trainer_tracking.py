"""Tracking: nothing is lost on resume, a foreign failure is one warning, names are checked."""

import json
import logging
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, DataError, EtudeError, MissingExtraError
from etude.run_folder import read_metrics
from etude.trainer.tracking import TRACKERS, Tracking


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


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
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


def test_wandb_continues_its_own_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is not installed here; this holds our side of its contract."""
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
