"""The demonstration dataset: items a chat template can take, faults that name their row."""

import json

import pytest

from etude.data import SFTDataset, write_parquet
from etude.errors import DataError

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_parquet_rows_come_back_without_arrows_nulls(tmp_path):
    rows = [
        {"messages": [USER, ASSISTANT]},
        {"messages": [USER, CALLING, {"role": "tool", "content": "2"}, ASSISTANT], "tools": [SCHEMA]},
    ]
    data = SFTDataset(str(write_parquet(rows, tmp_path / "x.parquet")))
    assert list(data) == [{"tools": None, **rows[0]}, rows[1]]


def test_arguments_and_tools_may_be_json_text(tmp_path):
    text = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {"messages": [USER, CALLING | {"tool_calls": [text]}], "tools": json.dumps([SCHEMA | {"default": None}])}
    data = SFTDataset([str(write_parquet([row], tmp_path / "x.parquet"))])
    assert data[0] == {"messages": [USER, CALLING], "tools": [SCHEMA | {"default": None}]}
    data[0]["messages"].clear()
    assert len(data[0]["messages"]) == 2
    assert len(data) == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": []}, "no column 'messages' (columns: prompt)"),
        ({"messages": []}, "messages must be a non-empty list"),
        ({"messages": [ASSISTANT, USER]}, "messages must end with an assistant message, not user"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0] has the unknown role 'bot'"),
        ({"messages": [ASSISTANT], "tools": "["}, "tools is text but not valid JSON"),
        ({"messages": [ASSISTANT], "tools": {"a": 1}}, "tools must be a list of tool schemas, got dict"),
        ({"messages": [ASSISTANT], "tools": [{"name": "f"}]}, "tools[0] must be {type: function"),
    ],
)
def test_every_fault_names_file_and_line(tmp_path, row, reason):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": [ASSISTANT]}) + "\n" + json.dumps(row))
    with pytest.raises(DataError) as raised:
        SFTDataset(str(path))
    assert str(raised.value).startswith(f"{path}:2: ")
    assert reason in str(raised.value)


def test_no_files_is_an_error():
    with pytest.raises(DataError, match=r"data\.train_files"):
        SFTDataset([])
