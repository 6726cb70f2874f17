"""Rollout dumps: exact round trips, strict JSON for anything, atomic files, errors that name file and line."""

import json
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.dumps import (
    list_dump_steps,
    read_rollouts,
    rollout_record,
    sequence_record,
    trajectory_from_record,
    write_rollouts,
)
from etude.errors import DataError, EtudeError
from etude.jsonl import json_line, json_safe
from etude.trajectory import Provenance, Rewards, Segment, StopReason, ToolCallRecord, Trajectory

ROW = {
    "uid": "u1",
    "index": 7,
    "data_source": "gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"index": 7},
}


def strict(line: bytes) -> object:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def example() -> Trajectory:
    trajectory = Trajectory("r1", [1, 2, 3])
    trajectory.append([4, 5], Provenance.SAMPLED, log_probs=[-0.1, -0.25], weight_versions=[3, 4])
    trajectory.assistant_turns = 1
    trajectory.append([6], Provenance.TEMPLATE)
    trajectory.append([7, 8], Provenance.TOOL)
    trajectory.append([9], Provenance.SAMPLED, log_probs=[-0.5])
    trajectory.assistant_turns = 2
    trajectory.user_turns = 1
    trajectory.tool_calls.append(ToolCallRecord(0, "calculator", '{"x": 1}', "1", 0.5, 0.01, None, {"n": 1}))
    trajectory.rewards = Rewards([(0, "calculator", 0.5)], {"calculator": 0.25}, 1.0, {"acc": 1})
    trajectory.stop_reason = StopReason.MAX_ASSISTANT_TURNS
    trajectory.timings = {"generate": 1.5}
    trajectory.metrics = {"attempt": 1}
    trajectory.messages = [{"role": "user", "content": "12 * 6?"}]
    return trajectory


finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    ids = tuple(draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=5)))
    provenance = draw(st.sampled_from(Provenance))
    same = {"min_size": len(ids), "max_size": len(ids)}
    probs = draw(st.none() | st.lists(finite, **same).map(tuple))
    versions = draw(st.none() | st.lists(st.integers(0, 9), **same).map(tuple))
    return Segment(ids, provenance, draw(st.integers(0, 9)), probs, versions)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    text = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates included
    call = st.builds(
        ToolCallRecord, turn=st.integers(0, 5), name=text, arguments=text, response=text, reward=finite, seconds=finite
    )
    rewards = st.builds(
        Rewards,
        steps=st.lists(st.tuples(st.integers(0, 5), text, finite), max_size=3),
        final=st.dictionaries(text, finite, max_size=2),
        score=st.none() | finite,
    )
    return Trajectory(
        request_id=draw(text),
        prompt_ids=draw(st.lists(st.integers(0, 9), max_size=4)),
        segments=draw(st.lists(segments(), max_size=4)),
        messages=draw(st.lists(st.fixed_dictionaries({"role": text, "content": text}), max_size=2)),
        tool_calls=draw(st.lists(call, max_size=2)),
        rewards=draw(rewards),
        stop_reason=draw(st.sampled_from(StopReason)),
        assistant_turns=draw(st.integers(0, 9)),
        user_turns=draw(st.integers(0, 9)),
        timings=draw(st.dictionaries(text, finite, max_size=2)),
    )


@given(trajectories())
def test_a_trajectory_comes_back_exactly_through_its_line(trajectory: Trajectory) -> None:
    line = json_line(rollout_record(trajectory, ROW, step=3, input="q", output="a", score=1.0))
    assert line.count(b"\n") == 1
    assert trajectory_from_record(strict(line)) == trajectory


def test_a_record_is_enough_to_replay_and_rescore() -> None:
    trajectory = example()
    record = rollout_record(trajectory, ROW, step=3, input="q", output="a", score=1.75)
    assert {k: record[k] for k in ("input", "output", "score", "step", "uid", "gts", "data_source", "attempt")} == {
        "input": "q",
        "output": "a",
        "score": 1.75,
        "step": 3,
        "uid": "u1",
        "gts": "72",
        "data_source": "gsm8k",
        "attempt": 1,
    }
    assert record["response_ids"] == [4, 5, 6, 7, 8, 9]
    assert record["response_mask"] == [1, 1, 0, 0, 0, 1]
    assert record["response_log_probs"] == [-0.1, -0.25, 0.0, 0.0, 0.0, -0.5]
    assert record["rewards"]["final"] == {"calculator": 0.25}
    assert record["stop_reason"] == "max_assistant_turns"
    assert trajectory_from_record(record).token_level_scores() == trajectory.token_level_scores()


def test_what_one_reads_by_eye_comes_first_and_once() -> None:
    earlier = sequence_record(example(), input="q0", output="a0")
    record = rollout_record(example(), ROW, step=3, input="q", output="a", score=None, earlier=[earlier])
    assert list(record)[:5] == ["input", "output", "gts", "score", "step"]
    assert record["earlier"] == [earlier]
    assert json_line(record).count(b'"input"') == 2  # its own, and the earlier sequence's


def test_the_plain_record_of_a_trajectory_is_read_too() -> None:
    trajectory = example()
    assert trajectory_from_record(trajectory.to_record()).segments == trajectory.segments
    assert trajectory_from_record(trajectory.to_record()).assistant_turns == 2
    assert trajectory_from_record(trajectory.to_record()).user_turns == 1


def test_segment_texts_are_kept_and_must_fit() -> None:
    record = rollout_record(example(), ROW, step=1, input="", output="", score=None, texts=["a", "b", "c", "d"])
    assert [segment["text"] for segment in record["segments"]] == ["a", "b", "c", "d"]
    assert trajectory_from_record(record).segments == example().segments
    with pytest.raises(ValueError, match="1 texts for 4 segments"):
        rollout_record(example(), ROW, step=1, input="", output="", score=None, texts=["a"])


def test_a_row_without_a_uid_or_ground_truth_is_still_a_record() -> None:
    record = rollout_record(Trajectory("r", []), {}, step=0, input="", output="", score=None)
    assert record["uid"] is None
    assert record["gts"] is None
    assert record["attempt"] == 0


def test_log_probs_that_are_not_finite_come_back_as_nan() -> None:
    trajectory = Trajectory("r", [1])
    trajectory.append([1, 2], Provenance.SAMPLED, log_probs=[-math.inf, -1.0])
    back = trajectory_from_record(strict(json_line(trajectory.to_record())))
    assert math.isnan(back.segments[0].log_probs[0])
    assert back.segments[0].log_probs[1] == -1.0


def test_rewards_that_are_not_finite_come_back_as_documented() -> None:
    trajectory = Trajectory("r", [1], rewards=Rewards([(0, "t", math.nan)], {"t": math.inf}, math.nan))
    back = trajectory_from_record(strict(json_line(trajectory.to_record()))).rewards
    assert math.isnan(back.steps[0][2])
    assert math.isnan(back.final["t"])
    assert back.score is None


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: object


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        (np.float32("inf"), None),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array([{"a": np.nan}], dtype=object), [{"a": None}]),
        (torch.tensor(2), 2),
        (torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True), [1.5]),
        (b"\x00\xff", {"base64": "AP8="}),
        ({1: (1, 2), Colour.RED: Colour.RED}, {"1": [1, 2], "red": "red"}),
        (Point(Path("a/b")), {"x": "a/b"}),
        (Unprintable(), "<Unprintable>"),
        (2**2000, hex(2**2000)),
        (True, True),
    ],
)
def test_anything_becomes_plain_json(value: object, expected: object) -> None:
    safe = json_safe(value)
    assert safe == expected
    assert type(safe) is type(expected)


def test_cycles_and_huge_nesting_end() -> None:
    cycle: dict[str, object] = {}
    cycle["self"] = cycle
    assert strict(json_line(cycle)) is not None
    assert len(json_safe(object.__new__(type("X" * 500, (), {})))) <= 200


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "new", 1, [{"a": 1}])

    def broken():
        yield {"a": 2}
        raise RuntimeError("the reward function fell over")

    with pytest.raises(RuntimeError):
        write_rollouts(tmp_path / "new", 1, broken())
    assert list(read_rollouts(tmp_path / "new" / "1.jsonl")) == [{"a": 1}]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["1.jsonl"]


def test_a_folder_that_cannot_be_made_is_an_error_naming_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EtudeError, match=r"file/4\.jsonl"):
        write_rollouts(tmp_path / "file", 4, [{}])


def test_line_separators_in_text_split_no_line(tmp_path: Path) -> None:
    records = [{"t": "a\u2028b\x85c\nd\re"}, {"t": "\ud800 é"}]
    path = write_rollouts(tmp_path, 1, records)
    assert list(read_rollouts(path)) == records
    assert "é".encode() in write_rollouts(tmp_path, 2, [{"t": "é"}]).read_bytes()


@pytest.mark.parametrize(("bad", "reason"), [("{", "not JSON"), ("[1]", "found list"), ("[" * 100000, "not JSON")])
def test_a_bad_line_is_named(tmp_path: Path, bad: str, reason: str) -> None:
    (tmp_path / "1.jsonl").write_text('{"a": 1}\n\n' + bad + "\n")
    records = read_rollouts(tmp_path / "1.jsonl")
    assert next(records) == {"a": 1}
    with pytest.raises(DataError, match=rf"1\.jsonl: line 3.*{reason}"):
        next(records)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"9\.jsonl"):
        list(read_rollouts(tmp_path / "9.jsonl"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"segments": None}, "segments"),
        ({"segments": [{"token_ids": [1], "provenance": "martian", "turn": 0}]}, "segments"),
        ({"segments": [{"token_ids": [1], "provenance": "tool", "turn": 0, "log_probs": [1, 2]}]}, "segments"),
        ({"stop_reason": "bored"}, "stop_reason"),
        ({"rewards": {"steps": [1]}}, "rewards"),
        ({"tool_calls": [{"unknown": 1}]}, "tool_calls"),
        ({"prompt_ids": ["x"]}, "prompt_ids"),
    ],
)
def test_a_malformed_record_names_the_key(change: dict, named: str) -> None:
    with pytest.raises(DataError, match=f"'{named}' is malformed"):
        trajectory_from_record(example().to_record() | change)


def test_a_missing_key_is_named() -> None:
    record = example().to_record()
    del record["stop_reason"]
    with pytest.raises(DataError, match="'stop_reason' is missing"):
        trajectory_from_record(record)


def test_steps_of_a_folder(tmp_path: Path) -> None:
    assert list_dump_steps(tmp_path / "none") == []
    for step in (10, 2):
        write_rollouts(tmp_path, step, [])
    (tmp_path / "notes.jsonl").write_text("")
    assert list_dump_steps(tmp_path) == [2, 10]
