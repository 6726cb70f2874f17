"""Marking contents: the rendered text is unchanged and each span is where its content is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.chat.contents import CLOSE, OPEN, Span, mark, plain_message, unmark

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters=OPEN + CLOSE), max_size=20)


@given(contents=st.lists(TEXT, max_size=4), trims=st.booleans())
def test_marks_do_not_change_what_a_template_renders(contents, trims):
    def render(texts):
        return "".join(f"[{text.strip() if trims else text}]\n" for text in texts)

    marked = [mark({"role": "tool", "content": content}) for content in contents]
    text, spans = unmark(render(entry.message["content"] for entry in marked), marked)
    assert text == render(contents)
    found = {span.message: text[span.start : span.end] for span in spans}
    for number, content in enumerate(contents):
        if content.strip():
            assert found[number] == (content.strip() if trims else content)
        else:
            assert number not in found


def test_escaped_contents_keep_their_span():
    entry = mark({"role": "tool", "content": 'a "b"'})
    text, spans = unmark('{"out": "' + entry.message["content"].replace('"', '\\"') + '"}', [entry])
    assert [text[span.start : span.end] for span in spans] == ['a \\"b\\"']


def test_parts_belong_to_their_message():
    image = {"type": "image", "url": "x"}
    entry = mark({"role": "tool", "content": [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}]})
    assert entry.message["content"][1] == image
    first, _, second = entry.message["content"]
    text, spans = unmark(f"{first['text']}|{second['text']}", [mark({"role": "user", "content": ""}), entry])
    assert (text, spans) == ("a|b", [Span(0, 1, 1), Span(2, 3, 1)])


@pytest.mark.parametrize("rendered", ["", f"{OPEN}a{CLOSE}{OPEN}a{CLOSE}", f"{OPEN}a", f"{CLOSE}a{OPEN}"])
def test_lost_and_repeated_contents_are_noticed(rendered):
    with pytest.raises(ValueError, match="exactly once"):
        unmark(rendered, [mark({"role": "tool", "content": "a"})])


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


def test_empty_keys_of_parquet_rows_vanish():
    row = {"role": "user", "content": None, "tool_calls": None, "name": None}
    assert plain_message(row) == {"role": "user", "content": None}
