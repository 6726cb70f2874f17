"""Reading and writing data files: what comes back is what was written, and every fault names its file and place."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data import files
from etude.data.files import located_rows, plain, read_rows, without_nulls, write_parquet
from etude.errors import DataError

NAMES = st.text("abcdef", min_size=1, max_size=4)
# one type a leaf, chosen by position, so that a column fits Arrow; None and absent keys are what Arrow pads with
NESTED = st.fixed_dictionaries(
    {"data_source": st.text(max_size=8), "prompt": st.lists(st.fixed_dictionaries({"content": st.text(max_size=8)}))},
    optional={
        "number": st.integers(-(2**63), 2**63 - 1),
        "extra_info": st.fixed_dictionaries(
            {"index": st.integers(0, 9)},
            optional={"tools": st.dictionaries(NAMES, st.fixed_dictionaries({"k": st.floats(allow_nan=False)}))},
        ),
    },
)


def pruned(value):
    """Without nulls and without empty dictionaries, which a file cannot always tell from absence."""
    if isinstance(value, dict):
        members = {key: pruned(member) for key, member in value.items()}
        return {key: member for key, member in members.items() if member not in (None, {})}
    return [pruned(member) for member in value] if isinstance(value, list) else value


@settings(deadline=None, max_examples=40)
@given(rows=st.lists(NESTED, min_size=1, max_size=6))
def test_parquet_round_trip_of_nested_rows(tmp_path_factory, rows):
    path = write_parquet(rows, tmp_path_factory.mktemp("round") / "rows.parquet")
    assert pruned(read_rows(path)) == pruned(rows)


def test_a_tool_absent_from_a_row_reads_back_as_null_and_is_pruned(tmp_path):
    rows = [{"t": {"a": {"create_kwargs": {"x": 1}}}}, {"t": {"b": {"execute_kwargs": {"y": [{"z": 1}, {"w": 2}]}}}}]
    back = read_rows(write_parquet(rows, tmp_path / "rows.parquet"))
    assert back[0]["t"]["b"] is None  # Arrow's doing
    assert [without_nulls(row) for row in back] == rows


def test_empty_structs_are_left_out_but_a_named_tool_stays(tmp_path):
    row = {"a": {}, "b": {"c": {}, "d": 1}, "l": [{}], "extra_info": {"tools_kwargs": {"search": {}, "run": {"e": {}}}}}
    back = read_rows(write_parquet([row], tmp_path / "rows.parquet"))
    expected = {"b": {"d": 1}, "extra_info": {"tools_kwargs": {"search": {}, "run": {}}}}
    assert [without_nulls(found) for found in back] == [expected]


def test_columns_are_the_union_of_all_rows(tmp_path):
    back = read_rows(write_parquet([{"a": 1}, {"b": "x"}], tmp_path / "rows.parquet"))
    assert back == [{"a": 1, "b": None}, {"a": None, "b": "x"}]


def test_numpy_values_become_plain(tmp_path):
    made = plain({"a": np.array([1, 2]), "b": np.float64(0.5), "c": (np.array([{"d": np.int64(3)}], dtype=object),)})
    assert made == {"a": [1, 2], "b": 0.5, "c": [[{"d": 3}]]}
    assert type(made["b"]) is float
    assert type(made["c"][0][0]["d"]) is int


def test_json_lines_skip_blank_lines_and_keep_line_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n  \n{"a": "é"}', encoding="utf-8")
    assert list(located_rows(path)) == [(f"{path}:1", {"a": 1}), (f"{path}:4", {"a": "é"})]


def test_json_holds_an_array_or_lines(tmp_path):
    array, lines = tmp_path / "array.json", tmp_path / "lines.json"
    array.write_text('\ufeff [\n{"a": 1}, {"a": 2}]', encoding="utf-8")
    lines.write_text('{"a": 1}\n{"a": 2}\n')
    assert read_rows(array) == read_rows(lines) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "content", "place", "reason"),
    [
        ("x.jsonl", b'{"a": 1}\n{"a": \n', "x.jsonl:2", "not valid JSON"),
        ("x.jsonl", b'{"a": 1}\n\xff\xfe\xfd\n', "x.jsonl:2", "not UTF-8"),
        ("x.jsonl", '{"a": 1}\n'.encode("utf-16"), "x.jsonl:1", "save the file as UTF-8"),
        ("x.jsonl", b'{"a": 1}\n[1]\n', "x.jsonl:2", "must be an object, got list"),
        ("x.jsonl", b"[" * 200_000, "x.jsonl:1", "not valid JSON"),
        ("x.jsonl", b"\n\n", "x.jsonl", "no rows"),
        ("x.jsonl", b"", "x.jsonl", "no rows"),
        ("x.json", b"[]", "x.json", "no rows"),
        ("x.json", b'[{"a": 1}, 3]', "x.json: row 1", "must be an object, got int"),
        ("x.json", b'[{"a": 1}', "x.json", "not valid JSON"),
        ("x.parquet", b"PAR1 but not really", "x.parquet", "not a readable parquet file"),
        ("x.parquet", b"", "x.parquet", "not a readable parquet file"),
        ("x.csv", b"a,b", "x.csv", "must end in .parquet, .jsonl or .json"),
    ],
)
def test_a_faulty_file_is_one_line_that_names_the_place(tmp_path, name, content, place, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_rows(tmp_path / name)
    text = str(raised.value)
    assert text.startswith(f"{tmp_path}/{place}")
    assert reason in text
    assert "\n" not in text


def test_a_damaged_page_names_the_file(tmp_path):
    path = write_parquet([{"a": str(number)} for number in range(5000)], tmp_path / "x.parquet")
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.parquet: not a readable parquet file \(after row 0\)"):
        read_rows(path)


def test_a_line_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 20)
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"a": 1}) + "\n" + json.dumps({"a": "long" * 10}))
    with pytest.raises(DataError, match=r"x\.jsonl:2: the line is longer"):
        read_rows(path)


def test_a_whole_json_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 5)
    (tmp_path / "x.json").write_text('[{"a": 1}]')
    with pytest.raises(DataError, match=r"x\.json: .*use \.jsonl or \.parquet"):
        read_rows(tmp_path / "x.json")


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "train.parquet").touch()
    with pytest.raises(DataError, match=r"trian\.parquet; did you mean 'train\.parquet'\?"):
        read_rows(tmp_path / "trian.parquet")
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        read_rows(tmp_path / "nowhere" / "train.parquet")
    with pytest.raises(DataError, match="is a folder"):
        read_rows(tmp_path)


def test_a_parquet_file_without_rows(tmp_path):
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: the file holds no rows"):
        read_rows(tmp_path / "x.parquet")


@pytest.mark.parametrize("values", [["a", {"target": ["a"]}], [1, "a"], [2**70, 1]])
def test_a_column_of_mixed_types_is_named(tmp_path, values):
    with pytest.raises(DataError, match=r"x\.parquet: column 'reward_model' does not fit"):
        write_parquet([{"reward_model": {"ground_truth": value}} for value in values], tmp_path / "x.parquet")
    assert list(tmp_path.iterdir()) == []


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    path = write_parquet([{"a": 1}], tmp_path / "sub" / "x.parquet")
    with pytest.raises(DataError, match="no rows to write"):
        write_parquet([], path)

    def half(table, where):
        where.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(files.pq, "write_table", half)
    with pytest.raises(DataError, match=r"x\.parquet: cannot be written: disk full"):
        write_parquet([{"a": 2}], path)
    assert read_rows(path) == [{"a": 1}]
    assert [entry.name for entry in path.parent.iterdir()] == ["x.parquet"]
