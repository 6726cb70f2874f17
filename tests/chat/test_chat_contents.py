"""Messages as templates expect them, and the texts of their contents."""

import pytest

from etude.chat.rendering import clean_message, plain_message, texts_of, with_texts


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("a", ["a"]),
        (None, [""]),
        ([{"type": "text", "text": "a"}, {"type": "image", "url": "x"}, {"type": "text", "text": "b"}], ["a", "b"]),
        ([], []),
    ],
)
def test_texts_are_taken_out_and_put_back(content, texts):
    message = clean_message({"role": "tool", "content": content, "name": "f"})
    assert texts_of(message) == texts
    assert with_texts([message, message], texts * 2) == [message] * 2
    [other] = with_texts([message], ["b"] * len(texts))
    assert texts_of(other) == ["b"] * len(texts)
    assert {**other, "content": None} == {**message, "content": None}


def test_arguments_become_objects_where_they_are_json():
    def arguments_of(given_arguments):
        call = {"id": "1", "function": {"name": "f", "arguments": given_arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        made = plain_message(message)["tool_calls"][0]["function"]["arguments"]
        assert call["function"]["arguments"] is given_arguments  # the caller's message is not changed
        return made

    assert arguments_of('{"a": [1]}') == {"a": [1]}
    assert arguments_of({"a": 1}) == {"a": 1}
    assert arguments_of("[1]") == "[1]"
    assert arguments_of("not json") == "not json"
    assert arguments_of(deep := '{"a":' * 100_000 + "1" + "}" * 100_000) == deep


def test_empty_keys_of_parquet_rows_vanish():
    row = {"role": "user", "content": None, "tool_calls": None, "name": None}
    assert plain_message(row) == {"role": "user", "content": None}
