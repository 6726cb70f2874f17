"""The benchmark's own parts: the task, what readings become, and that every row names programs that exist."""

import asyncio
import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True, scope="module")
def on_path():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def measured(**given):
    from side_by_side.results import Measured

    readings = {"Étude": [{"step_cpu": v} for v in (1.0, 2.0, 3.0)], "TRL": [{"step_cpu": v} for v in (4.0, 4.0, 4.0)]}
    row = {
        "kind": "step",
        "name": "step_1",
        "title": "a step",
        "figures": ("step_cpu", "memory"),
        "targets": {"step_cpu": 0.45},
        "readings": readings,
    }
    return Measured(**{**row, **given})


def test_ratios_are_taken_within_a_repetition():
    row = measured(
        readings={"Étude": [{"x": 1.0}, {"x": 30.0}, {"x": 3.0}], "TRL": [{"x": 10.0}, {"x": 100.0}, {"x": 4.0}]}
    )
    assert row.median("Étude", "x") == 3.0
    assert row.ratio("TRL", "x") == 0.3  # of 0.1, 0.3 and 0.75
    assert row.quartiles("Étude", "x") == (2.0, 16.5)
    assert row.ratio("TRL", "memory") is row.median("TRL", "memory") is None


def test_a_row_measured_again_takes_its_old_place(tmp_path):
    from side_by_side.results import Results

    results = Results(tmp_path / "work" / "results.json")
    assert results.load() == []
    for row in (measured(), measured(name="loop_64"), measured(title="again")):
        results.put(row)
    assert [(row.name, row.title) for row in results.load()] == [("step_1", "again"), ("loop_64", "a step")]
    assert results.load()[1] == measured(name="loop_64")


def test_tables_show_medians_spread_ratio_and_target_of_what_was_measured():
    from side_by_side.presentation import tables

    text = tables([measured()])
    assert "| step, CPU s | 2.00 (1.50–2.50) | 4.00 (4.00–4.00) | 0.50 | ≤ 0.45 |" in text
    assert "3 repetitions" in text
    assert "memory" not in text


def test_tables_say_when_and_beside_what_a_row_was_measured():
    from side_by_side.presentation import tables

    shown = tables([measured(conditions={"date": "2026-11-21", "load": 0.74})])
    assert "**a step** (3 repetitions, 2026-11-21, load 0.7)" in shown
    assert "**a step** (1 repetition)" in tables([measured(readings={"Étude": [{"step_cpu": 1.0}]})])


def test_publishing_keeps_rows_that_were_not_measured_again(tmp_path):
    import run
    from side_by_side.results import Results

    page, kept = tmp_path / "page.md", Results(tmp_path / "published.json")
    translation = tmp_path / "page.zh.md"
    for each in (page, translation):
        each.write_text(f"before\n{run._BEGIN}\nold\n{run._END}\nafter\n")
    run._publish([measured(title="first"), measured(name="loop_64", title="loops")], page, kept)
    run._publish([measured(title="second", conditions={"time": 2.0})], page, kept)
    run._publish([measured(title="stale", conditions={"time": 1.0})], page, kept)
    assert [row.title for row in kept.load()] == ["second", "loops"]
    text = page.read_text()
    assert translation.read_text() == text
    assert (text[:7], text[-7:]) == ("before\n", "\nafter\n")
    assert "old" not in text
    assert [title in text for title in ("first", "second", "stale", "loops")] == [False, True, False, True]
    assert (tmp_path / "page.svg").exists()


def test_the_published_tables_are_those_of_the_published_readings():
    import run
    from side_by_side.presentation import tables
    from side_by_side.results import Results

    shown = tables(run._ordered(Results(run._PUBLISHED).load()))
    for name in ("performance.md", "performance.zh.md"):
        assert shown in (BENCHMARKS.parent / "docs" / name).read_text(encoding="utf-8"), name


def test_the_plot_is_the_same_file_for_the_same_readings(tmp_path):
    from side_by_side.presentation import plot

    for name in ("one.svg", "two.svg"):
        plot([measured()], tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert b"Date" not in (tmp_path / "one.svg").read_bytes()


def test_every_row_names_drivers_that_exist_and_is_named_once():
    from side_by_side.environments import PACKAGES
    from side_by_side.rows import KINDS, rows

    made = list(rows(KINDS, [1, 2], ["--checkpoint", "folder"]))
    assert len({row.name for row in made}) == len(made)
    assert {row.kind for row in made} == set(KINDS)
    for row in made:
        assert set(row.targets) <= set(row.figures)
        assert row.contenders[0].name.startswith("Étude")
        for contender in row.contenders:
            assert contender.environment in ("etude", *PACKAGES)
            if contender.command[0] == "-m" and contender.command[1].startswith("side_by_side."):
                assert importlib.util.find_spec(contender.command[1]) is not None


def test_latency_and_failure_follow_from_the_call():
    from side_by_side.task import Latency

    slow = Latency(0.5, failures=0.05)
    draws = [slow.draw(f"{i} + 1") for i in range(4000)]
    assert draws == [slow.draw(f"{i} + 1") for i in range(4000)]
    assert sorted(seconds for seconds, _ in draws)[2000] == pytest.approx(0.5, rel=0.1)
    assert sum(fails for _, fails in draws) == pytest.approx(200, rel=0.3)
    assert [fails for _, fails in draws] == [Latency(0.0, failures=0.05).draw(f"{i} + 1")[1] for i in range(4000)]
    assert Latency().draw("1 + 1") == (0.0, False)


def test_demonstrations_are_right_and_the_calculator_reads_nothing_else():
    from side_by_side import task

    for question in task.questions(50, 3):
        said = task.demonstration(question, random.Random(0), task.SYSTEM)
        calls = [call["function"]["arguments"]["expression"] for m in said for call in m.get("tool_calls", [])]
        assert [task.calculate(call) for call in calls] == [m["content"] for m in said if m["role"] == "tool"]
        assert task.score(said[-1]["content"], True, question.answer) == 1.25
    for wrong in ("1+1", "1 / 1", "__import__('os')", "1 + 1 + 1", ""):
        with pytest.raises(ValueError, match="two whole numbers"):
            task.calculate(wrong)


def test_the_system_prompt_is_the_one_given_or_the_checkpoints(tmp_path):
    from side_by_side import task

    assert task.system_prompt(tmp_path, None) == task.SYSTEM
    (tmp_path / task.SYSTEM_FILE).write_text(json.dumps({"system": "Noted."}))
    assert task.system_prompt(tmp_path, None) == "Noted."
    assert task.system_prompt(tmp_path, "Given.") == "Given."


def test_the_script_says_the_same_to_all_and_the_loops_ask_all_of_it():
    from side_by_side import canned
    from side_by_side.drivers import loop

    from etude.models import build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer(["The next step is one more call, with both numbers as they are."], 400)
    tokenizer.chat_template = (BENCHMARKS / "side_by_side" / "chat_template.jinja").read_text()
    options = type("Options", (), {"turns": 2})()
    for build in (loop._floor, loop._plain, loop._etude):
        script = canned.Script(tokenizer, 3, turns=2, seed=1)
        assert script.seconds == canned.Script(tokenizer, 3, turns=2, seed=1).seconds
        asyncio.run(loop._awaited(build(tokenizer, options), script))
        assert script.asked == 9
    assert loop.Meter().read()["cpu"] >= 0
