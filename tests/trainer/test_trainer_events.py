"""What a run tells whoever watches it: each step once, in order, and its end however it ends."""

import json

import pytest
from house_stage import metrics

from etude.trainer.events import Notice, RolloutProgress, RunEnded, RunStarted, StepFinished, UpdateProgress
from etude.trainer.run import evaluate, train


def steps(events):
    return [event.step for event in events if isinstance(event, StepFinished)]


def test_a_run_reports_its_steps_between_its_start_and_its_end(tiny, tmp_path):
    endings = []

    def emit(event):
        events.append(event)
        if isinstance(event, RunEnded):
            endings.append(json.loads((tmp_path / "run.json").read_text())["ended"])

    events = []
    settings = (f"data.val_files={tiny.folder}/data/val.parquet", "trainer.total_training_steps=2")
    train(tiny.config(tmp_path, *settings), emit)
    assert (type(events[0]), type(events[-1]), endings) == (RunStarted, RunEnded, ["completed"])
    assert events[0].options.default_local_dir == str(tmp_path)
    assert (events[0].total_steps, events[0].validation) == (2, "greedy")
    assert steps(events) == [0, 1, 2]
    assert [dict(event.metrics, step=event.step) for event in events if isinstance(event, StepFinished)] == metrics(
        tmp_path
    )
    assert all(event.done <= event.total for event in events if isinstance(event, RolloutProgress))
    assert any(isinstance(event, UpdateProgress) and event.done == event.total for event in events)
    resumed = []
    train(tiny.config(tmp_path, *settings, "trainer.total_training_steps=3"), resumed.append)
    line = f"going on after step 2 of 3 ({tmp_path}/global_step_2)"
    assert [event.text for event in resumed if isinstance(event, Notice)] == [line]
    assert steps(resumed) == [3]


def test_passes_that_make_fewer_steps_end_at_the_last_step(tiny, tmp_path, monkeypatch):
    """Steps that generate further prompts take several batches of a pass."""
    flat = tmp_path / "flat.py"
    flat.write_text("def compute_score(**kwargs):\n    return 1.0\n")
    events = []
    train(
        tiny.config(
            tmp_path / "run",
            f"custom_reward_function.path={flat}",
            "trainer.total_training_steps=null",
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.max_num_gen_batches=2",
        ),
        events.append,
    )
    finished = [event for event in events if isinstance(event, StepFinished)]
    assert finished[0].total_steps == 4
    assert finished[-1].step == finished[-1].total_steps == 2


def test_a_run_that_fails_reports_its_end(tiny, tmp_path):
    (tmp_path / "odd.py").write_text("def compute_score(**kwargs):\n    raise KeyError('no such answer')\n")
    events = []
    with pytest.raises(Exception, match="no such answer"):
        train(tiny.config(tmp_path / "run", f"custom_reward_function.path={tmp_path}/odd.py"), events.append)
    assert (type(events[0]), type(events[-1])) == (RunStarted, RunEnded)
    assert steps(events) == []


def test_an_evaluation_reports_its_rollouts(tiny, tmp_path):
    events = []
    evaluate(tiny.config(tmp_path, f"data.val_files={tiny.folder}/data/val.parquet"), events.append)
    assert (type(events[0]), type(events[-1])) == (RunStarted, RunEnded)
    assert events[-2] == RolloutProgress(3, 3)
