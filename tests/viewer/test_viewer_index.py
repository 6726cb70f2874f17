"""The index of dumps: every trajectory by offset, refreshes that read only what is new, bad lines named and not fatal."""

import json
import math
import os
import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from index_stage import make_record, make_records, opened, verl_line, write_run

from etude.dumps import read_rollouts, write_rollouts
from etude.errors import ConfigError, DataError
from etude.jsonl import json_line
from etude.trajectory import StopReason
from etude.viewer import index as module
from etude.viewer.index import RolloutIndex, count_values, group_rows
from etude.viewer.query import Filter


def test_a_run_folder_gives_every_trajectory_with_what_lists_need(tmp_path):
    index = opened(write_run(tmp_path))
    assert [(row.step, row.split) for row in index.rows] == [(1, "train")] * 4 + [(2, "train")] * 4 + [
        (2, "validation")
    ]
    row = index.rows[1]
    assert (row.place, row.uid, row.request_id) == ("rollouts/1.jsonl:2", "1-0", "r1")
    assert (row.score, row.stop_reason, row.data_source) == (0.75, "response_length", "gsm8k")
    assert (row.tools, row.calls, row.call_errors, row.turns) == (("calculator",), 1, 0, 2)
    assert (row.response_tokens, row.sampled_tokens) == (7, 5)
    assert (row.rewards, row.seconds, row.flags) == ({"calculator": 0.75, "score": 0.0}, 2.0, ("truncated",))
    assert index.bad == []
    assert index.complete


def test_a_trajectory_is_read_by_offset_as_it_was_written(tmp_path):
    index = opened(write_run(tmp_path))
    for step in (1, 2):
        rows = [row for row in index.rows if (row.split, row.step) == ("train", step)]
        assert [index.read(row) for row in rows] == list(read_rollouts(tmp_path / f"rollouts/{step}.jsonl"))
    assert index.texts(index.rows[0]) == ("Question 0: 12 * 6?", "I compute.\n72It is 72.")
    assert index.find("rollouts/2.jsonl:3") is index.rows[6]
    assert index.find("rollouts/2.jsonl:99") is None
    assert index.find("../../etc/passwd:1") is None


def test_verls_dumps_are_read_and_grouped_by_prompt(tmp_path):
    for step in (1, 2):
        (tmp_path / f"{step}.jsonl").write_text("".join(verl_line(step, number) for number in range(4)))
    index = opened(tmp_path)
    assert [row.step for row in index.rows] == [1] * 4 + [2] * 4
    assert [len(rows) for rows in group_rows(index.rows).values()] == [2] * 4
    assert (index.rows[0].score, index.rows[0].stop_reason, index.rows[0].tools) == (0.5, "", ())
    assert index.rows[0].prompt == index.rows[4].prompt
    assert index.siblings(index.rows[0]) == index.rows[:2]


def test_one_file_and_a_folder_of_unnumbered_files_open_too(tmp_path):
    write_rollouts(tmp_path, 7, make_records(7))
    assert len(opened(tmp_path / "7.jsonl").rows) == 4
    (tmp_path / "7.jsonl").rename(tmp_path / "mine.jsonl")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    index = opened(tmp_path)
    assert [row.name for row in index.rows] == ["mine.jsonl"] * 4
    assert index.bad == []


def test_a_run_whose_configuration_puts_the_dumps_elsewhere_is_followed(tmp_path):
    write_rollouts(tmp_path / "elsewhere", 1, make_records(1))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"trainer:\n  rollout_data_dir: {tmp_path / 'elsewhere'}\n")
    index = opened(run)
    assert [row.split for row in index.rows] == ["train"] * 4
    assert index.read(index.rows[0])["step"] == 1
    write_rollouts(run / "rollouts", 3, make_records(3))  # a copied run's own dumps come first
    index.refresh()
    assert {row.step for row in index.rows} == {3}


def test_a_relative_dump_folder_is_where_the_run_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rollouts(Path("elsewhere"), 1, make_records(1))
    Path("run").mkdir()
    Path("run/config.yaml").write_text("trainer:\n  rollout_data_dir: elsewhere\n")
    index = opened(Path("run"))
    assert index.read(index.rows[0])["step"] == 1


def test_evaluations_in_a_run_folder_have_splits_of_their_own(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    for name in ("evaluation/greedy", "eval-1a2b"):
        write_rollouts(run / name, 0, make_records(0))
    (run / "eval-1a2b" / "config.yaml").write_text(f"trainer:\n  rollout_data_dir: {run / 'rollouts'}\n")
    assert count_values(opened(run).rows)["split"] == {
        "train": 4,
        "validation": 1,
        "evaluation/greedy": 4,
        "eval-1a2b": 4,
    }
    assert {row.name for row in opened(run / "eval-1a2b").rows} == {"0.jsonl"}  # its own, not the configured run's


def test_a_missing_folder_is_a_clear_error(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        RolloutIndex(tmp_path / "absent")


def test_refresh_reads_only_what_is_new(tmp_path, monkeypatch):
    index = opened(write_run(tmp_path))
    parsed = []
    original = module.parse_row
    monkeypatch.setattr(
        module, "parse_row", lambda line, **where: parsed.append(where["name"]) or original(line, **where)
    )
    version = index.version
    assert not index.refresh()
    assert (parsed, index.version) == ([], version)
    write_rollouts(tmp_path / "rollouts", 3, make_records(3))
    with (tmp_path / "rollouts" / "2.jsonl").open("ab") as file:
        file.write(json_line(make_record(2, 9)))
    assert index.refresh()
    assert parsed == ["rollouts/2.jsonl"] + ["rollouts/3.jsonl"] * 4
    assert len(index.rows) == 14


def test_a_file_written_anew_or_removed_takes_its_rows_along(tmp_path):
    index = opened(write_run(tmp_path))
    write_rollouts(tmp_path / "rollouts", 2, [make_record(2, 5, group=7)])  # a resumed run makes the step again
    (tmp_path / "rollouts" / "1.jsonl").unlink()
    assert index.refresh()
    assert [(row.step, row.uid) for row in index.rows if row.split == "train"] == [(2, "2-7")]


def test_a_file_rewritten_in_place_is_read_from_its_start(tmp_path):
    path = tmp_path / "1.jsonl"
    path.write_text(verl_line(1, 0) * 2)
    index = opened(path)
    path.write_text("".join(verl_line(1, number) for number in (6, 4, 2)))
    index.refresh()
    assert [index.texts(row)[1] for row in index.rows] == ["They are 6.", "They are 4.", "They are 2."]


def test_a_line_still_being_written_counts_once_it_is_whole(tmp_path):
    path, line = tmp_path / "1.jsonl", verl_line()
    path.write_text(line + line[:30])
    index = opened(path)
    assert (len(index.rows), index.bad_lines, index.bad[0].place) == (1, 1, "1.jsonl:2")
    assert "cut off" in index.bad[0].reason
    path.write_text(line + line)
    index.refresh()
    assert (len(index.rows), index.bad) == (2, [])
    assert [row.line for row in index.rows] == [1, 2]
    path.write_text(line + line + line.rstrip("\n"))  # whole, without a newline
    index.refresh()
    assert (len(index.rows), index.bad) == (3, [])
    path.write_text(line * 4)  # its newline came later
    index.refresh()
    assert [row.line for row in index.rows] == [1, 2, 3, 4]


def test_bad_lines_are_named_and_never_fatal(tmp_path):
    path = tmp_path / "1.jsonl"
    lines = [verl_line().encode(), b"\n", b"not json\n", b'["a list"]\n', b'{"other": 1}\n', b"[" * 99999 + b"\n"]
    path.write_bytes(b"".join(lines) + verl_line(1, 3).encode() + b"\xff\xfe\n")
    index = opened(path)
    assert [row.line for row in index.rows] == [1, 7]
    assert [line.place for line in index.bad] == [f"1.jsonl:{n}" for n in (3, 4, 5, 6, 8)]
    assert index.read(index.rows[1])["output"] == "They are 3."


def test_a_line_of_any_length_costs_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 500)
    path = tmp_path / "1.jsonl"
    path.write_text(verl_line() + "x" * 5000 + "\n" + verl_line(1, 2) + "y" * 5000)
    index = opened(path)
    assert [row.line for row in index.rows] == [1, 3]
    assert [line.place for line in index.bad] == ["1.jsonl:2", "1.jsonl:4"]
    assert all("longer than" in line.reason for line in index.bad)


def test_a_pipe_named_like_a_dump_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "1.jsonl")
    (tmp_path / "2.jsonl").write_text(verl_line(2))
    index = opened(tmp_path)
    assert [row.step for row in index.rows] == [2]
    assert index.bad[0].place == "1.jsonl:0"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(make_record())), json_values))
@example({"num_turns": 2.0**54, "timings": {"a": 1e308, "b": 1e308}, "rewards": {"steps": [[0, "t", 1e308]] * 2}})
def test_whatever_the_values_are_a_line_is_a_row(tmp_path_factory, changed):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(json.dumps(make_record() | changed) + "\n")
    index = opened(path)
    assert len(index.rows) == 1
    row = index.rows[0]
    assert all(abs(number) <= 2**53 for number in (row.step, row.turns, row.calls))
    assert all(map(math.isfinite, (row.score or 0.0, row.seconds, *row.rewards.values())))


def test_text_that_looks_like_token_arrays_stays_text(tmp_path):
    words = ' "log_probs": [1, 2], \\"token_ids": [3] {"response_mask": [1, 1, 1]}'
    write_rollouts(tmp_path, 1, [make_record(words=words)])
    index = opened(tmp_path)
    assert index.texts(index.rows[0])[1].endswith(words)
    assert index.rows[0].response_tokens == 7


def test_time_up_leaves_the_rest_for_the_next_refresh(tmp_path):
    index = RolloutIndex(write_run(tmp_path))
    sizes = []
    while not index.complete:
        index.refresh(seconds=0.0)
        sizes.append(len(index.rows))
    assert sizes == sorted(sizes)
    assert len(sizes) > 2
    assert [row.place for row in index.rows] == [row.place for row in opened(tmp_path).rows]


def test_filters_restrict_and_combine(tmp_path):
    index = opened(write_run(tmp_path))

    def places(**wanted):
        return [row.place for row in index.select(Filter(**wanted)).rows]

    assert len(places(split="train")) == 8
    assert places(split="train", min_score=1.0, max_step=1) == ["rollouts/1.jsonl:1", "rollouts/1.jsonl:3"]
    assert places(max_score=1.0, stop_reason="response_length", min_step=2) == [
        "rollouts/2.jsonl:2",
        "rollouts/2.jsonl:4",
    ]
    assert places(tool="search") == places(data_source="math") == places(flag="retried") == []
    assert len(places(tool="calculator", data_source="gsm8k", flag="truncated")) == 4
    counts = count_values(index.rows)
    assert counts["stop_reason"] == {"completed": 5, "response_length": 4}
    assert counts["flag"] == {"truncated": 4}


def test_text_and_patterns_are_found_in_prompt_and_response(tmp_path):
    index = opened(write_run(tmp_path))
    assert len(index.select(Filter(text="it IS 27.")).rows) == 4
    assert len(index.select(Filter(text="question 1:")).rows) == 4
    assert len(index.select(Filter(text=r"is \d7\.$", regex=True)).rows) == 4
    assert index.select(Filter(text="log_probs")).rows == []  # a key, no text
    write_rollouts(tmp_path / "rollouts", 3, [make_record(3, words='naïve "quoted"\nSTRASSE')])
    index.refresh()
    for text in ('NAÏVE "quoted"\n', "straße"):
        assert len(index.select(Filter(text=text)).rows) == 1, text


def test_a_malformed_long_or_explosive_pattern_is_refused(tmp_path):
    write_rollouts(tmp_path, 1, [make_record(words="a" * 4000 + "b")])
    index = opened(tmp_path)
    for pattern, message in (("(", "search pattern"), ("a" * 501, "at most 500"), (r"(a|aa)+$", "too slow")):
        with pytest.raises(ConfigError, match=message):
            index.select(Filter(text=pattern, regex=True))


def test_a_search_ends_when_time_is_up_or_told_to(tmp_path):
    index = opened(write_run(tmp_path))
    found = index.select(Filter(text="12"), seconds=-1.0)
    assert (found.rows, found.searched, found.total, found.complete) == ([], 0, 9, False)
    polls = iter([False, False, True])
    found = index.select(Filter(text="12"), stop=lambda: next(polls))
    assert (len(found.rows), found.searched) == (2, 2)


def test_rows_sort_with_unknown_values_last(tmp_path):
    lines = [verl_line(1, n, score=score) for n, score in enumerate((0.5, None, 2.0, float("nan"), -1.0))]
    (tmp_path / "1.jsonl").write_text("".join(lines))
    index = opened(tmp_path)
    for descending, scores in ((False, [-1.0, 0.5, 2.0]), (True, [2.0, 0.5, -1.0])):
        found = index.select(sort="score", descending=descending).rows
        assert [row.score for row in found] == [*scores, None, None]
    with pytest.raises(ConfigError, match="no sort 'size'"):
        index.select(sort="size")


def test_a_record_whose_file_changed_since_is_an_error_not_nonsense(tmp_path):
    index = opened(write_run(tmp_path))
    row = index.rows[1]
    write_rollouts(tmp_path / "rollouts", 1, [make_record(1, words="longer" * 50)])
    with pytest.raises(DataError, match=r"rollouts/1.jsonl:2"):
        index.read(row)


def test_every_flag_is_raised_by_its_cause(tmp_path):
    records = [
        make_record(stop=StopReason.TOOL_RESPONSE_OVERFLOW),
        make_record(tool_error="tool"),
        make_record(tool_error="malformed"),
        make_record(answer=None),
        make_record(row={"attempt": 1}),
        make_record(),
    ]
    for turn in (0, 1):  # too many calls at once, and one of the turn that was cut
        lost = {"name": "calculator", "arguments": "{}", "response": "", "error": "not_executed", "turn": turn}
        records.append(make_record(stop=StopReason.RESPONSE_LENGTH) | {"tool_calls": [lost]})
    write_rollouts(tmp_path, 1, records)
    assert [row.flags for row in opened(tmp_path).rows] == [
        ("truncated",),
        ("tool_error",),
        ("tool_error", "malformed"),
        ("no_answer",),
        ("retried",),
        (),
        ("truncated", "tool_error"),
        ("truncated", "tool_error", "lost_call"),
    ]


def test_the_question_about_an_image_is_the_text_beside_it(tmp_path):
    record = make_record(1)
    record["messages"][0]["content"] = [
        {"type": "image"},
        {"type": "image"},
        {"type": "text", "text": "How many?\nCount."},
    ]
    (tmp_path / "1.jsonl").write_bytes(json_line(record))
    assert [row.question for row in opened(tmp_path).rows] == ["[image] [image] How many?"]


def test_thousands_of_rows_keep_two_lines_of_text(tmp_path):
    lines = [json_line(make_record(1, n, words=" word" * 200)) for n in range(16)]
    random.seed(0)
    for step in range(1, 11):
        (tmp_path / f"{step}.jsonl").write_bytes(b"".join(random.choices(lines, k=500)))
    index = opened(tmp_path)
    assert len(index.rows) == 5000
    held = sum(len(repr(row)) for row in index.rows)
    assert held < sum(path.stat().st_size for path in tmp_path.iterdir()) / 3
    assert {(row.question, len(row.answer)) for row in index.rows} == {("12 * 6?", 160)}
    assert "word" not in repr(index.rows[0]).replace(index.rows[0].answer, "")
