"""Rows for the built-in tools: they pass the row contract, survive parquet, and name the tools as configured."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_stage import invoke, lines

from etude.data import check_row, read_rows
from etude.data.prepare import geo3k, pictures, questions, video_holmes
from etude.errors import DataError
from etude.rewards import compute_score

NQ = Path(__file__).parents[3] / "shared" / "data" / "nq_open" / "nq_open_dev.jsonl"
GEO = {"problem": "<image>Find x.", "answer": "3 \\sqrt{5}", "images": [{"bytes": b"\x89PNG", "path": None}]}
FILM = {
    "video ID": "abc",
    "Question": "Who is the ghost?",
    "Options": {"A": "The boy", "B": "The man", "C": None},
    "Answer": "B",
    "Question Type": "SR",
}


def parquet(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_geo3k(tmp_path):
    parquet(tmp_path / "in" / "data" / "train-00000-of-00001.parquet", GEO, GEO)
    parquet(tmp_path / "in" / "data" / "validation-00000-of-00001.parquet", GEO)
    output = invoke("geo3k", "--input", tmp_path / "in", "--output-dir", tmp_path / "out").output
    assert f"2 rows  {tmp_path}/out/train.parquet" in output
    assert "(4 bytes)" in output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "train.parquet",
        "validation.parquet",
    ]
    row = check_row(read_rows(tmp_path / "out" / "train.parquet")[1], "x", [geo3k.TOOL])
    assert row["images"][0]["bytes"] == b"\x89PNG"
    assert row["extra_info"]["index"] == 1
    assert row["extra_info"]["tools_kwargs"] == {geo3k.TOOL: {"create_kwargs": {"ground_truth": "3 \\sqrt{5}"}}}
    answer = f"<think>so</think>\\boxed{{{row['reward_model']['ground_truth']}}}"
    assert compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])["score"] == 1.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"answer": None}, "'problem' and 'answer' as text"), ({"images": []}, "'images'"), ({"answer": " "}, "answer")],
)
def test_bad_geo3k_rows_are_named(tmp_path, change, reason):
    path = parquet(tmp_path / "train.parquet", GEO, {**GEO, **change})
    with pytest.raises(DataError, match=reason) as raised:
        geo3k.write([path], tmp_path / "out")
    assert str(raised.value).startswith(f"{path}: row 1: ")


@pytest.mark.parametrize(
    "example",
    [
        {"question": "Capital?", "answers": ["Beijing"]},
        {"question": "Capital?", "answer": "Beijing"},
        {"question": "Capital?", "golden_answers": ["Beijing"]},
    ],
)
def test_questions(tmp_path, example):
    path = lines(tmp_path / "dev.jsonl", example)
    output = invoke("questions", "--input", path, "--output-dir", tmp_path / "out").output
    assert f"1 rows  {tmp_path}/out/dev.parquet" in output
    [row] = read_rows(tmp_path / "out" / "dev.parquet")
    checked = check_row(row, "x", ["search"])
    assert checked["reward_model"]["ground_truth"] == {"target": ["Beijing"]}
    assert checked["extra_info"]["split"] == "dev"
    assert "`search` tool" in checked["prompt"][0]["content"]
    assert compute_score(row["data_source"], "<answer> beijing </answer>", row["reward_model"]["ground_truth"]) == 1.0


def test_questions_for_another_tool_and_format(tmp_path):
    path = lines(tmp_path / "dev.jsonl", {"question": "Capital?", "answers": ["Beijing"]})
    [row] = read_rows(questions.write([path], tmp_path / "web", tool="web_search")["dev"])
    assert check_row(row, "x", ["web_search"])
    [row] = read_rows(questions.write([path], tmp_path / "tags", tags=True)["dev"])
    assert "<search> and </search>" in row["prompt"][0]["content"]
    with pytest.raises(DataError, match="unknown search tool 'google'"):
        questions.write([path], tmp_path, tool="google")
    with pytest.raises(DataError, match="the same name"):
        questions.write([path, path], tmp_path)


@pytest.mark.parametrize(
    "example", [{"question": "x"}, {"question": "", "answers": ["y"]}, {"question": "x", "answers": [1]}]
)
def test_bad_questions_are_named(tmp_path, example):
    path = lines(tmp_path / "dev.jsonl", example)
    with pytest.raises(DataError, match=r"dev\.jsonl:1: needs"):
        questions.write([path], tmp_path / "out")


@pytest.mark.skipif(not NQ.is_file(), reason="NQ-Open is not beside this checkout")
def test_nq_open_is_read_whole(tmp_path):
    rows = read_rows(questions.write([NQ], tmp_path)[NQ.stem])
    assert len(rows) == len(NQ.read_text(encoding="utf-8").splitlines())
    for row in rows[:50]:
        check_row(row, "x", ["search"])


def test_pictures(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    path = lines(tmp_path / "train.jsonl", {"question": "What?", "answer": "A cat", "image": "a.png"})
    output = invoke("pictures", "--input", path, "--output-dir", tmp_path / "out", "--data-source", "mine").output
    assert "1 rows" in output
    [row] = read_rows(tmp_path / "out" / "train.parquet")
    checked = check_row(row, "x", [pictures.TOOL])
    assert checked["data_source"] == "mine"
    assert checked["prompt"][1]["content"] == "<image>\nWhat?"
    image = {"path": str(tmp_path / "a.png")}
    assert checked["images"] == [image]
    assert checked["extra_info"]["tools_kwargs"] == {pictures.TOOL: {"create_kwargs": {"image": image}}}


def test_pictures_as_bytes(tmp_path):
    path = parquet(tmp_path / "train.parquet", {"question": "<image>?", "answer": "x", "image": {"bytes": b"x"}})
    [row] = read_rows(pictures.write([path], tmp_path / "out")["train"])
    assert row["prompt"][1]["content"] == "<image>?"
    assert row["images"] == [{"bytes": b"x"}]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"image": "b.png"}, "there is no image"),
        ({"image": 3}, "needs 'image'"),
        ({"answer": None}, "needs 'question'"),
    ],
)
def test_bad_pictures_are_named(tmp_path, change, reason):
    path = lines(tmp_path / "train.jsonl", {"question": "What?", "answer": "A", "image": "a.png"} | change)
    with pytest.raises(DataError, match=rf"train\.jsonl:1: {reason}"):
        pictures.write([path], tmp_path / "out")


def test_video_holmes(tmp_path):
    (tmp_path / "abc.mp4").write_bytes(b"film")
    (tmp_path / "test_Video-Holmes.json").write_text(json.dumps([FILM]))
    output = invoke("video-holmes", "--input", tmp_path, "--videos", tmp_path, "--output-dir", tmp_path / "out").output
    assert f"1 rows  {tmp_path}/out/test.parquet" in output
    [row] = read_rows(tmp_path / "out" / "test.parquet")
    names = ["execute_frame_extraction", "execute_object_detection", "execute_frame_caption", "calc_video_reward"]
    checked = check_row(row, "x", names)
    assert checked["prompt"][1]["content"] == "Who is the ghost?\nA. The boy\nB. The man"
    kwargs = checked["extra_info"]["tools_kwargs"]
    assert list(kwargs) == names
    assert kwargs["execute_frame_extraction"]["create_kwargs"]["video_path"] == str(tmp_path / "abc.mp4")
    assert kwargs["calc_video_reward"]["create_kwargs"] == {"ground_truth": "B"}
    assert compute_score(row["data_source"], "<answer>B</answer>", "B") == 1.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"Answer": "C"}, "is none of the options A, B"),
        ({"video ID": "gone"}, "there is no video"),
        ({"video ID": "../abc"}, "must be a plain name"),
        ({"Options": "A"}, "needs 'video ID'"),
    ],
)
def test_bad_films_are_named(tmp_path, change, reason):
    (tmp_path / "abc.mp4").write_bytes(b"film")
    path = tmp_path / "train.json"
    path.write_text(json.dumps([FILM, FILM | change]))
    with pytest.raises(DataError, match=rf"train\.json: row 1: .*{reason}"):
        video_holmes.write([path], tmp_path, tmp_path / "out")
