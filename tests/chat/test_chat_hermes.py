"""The Hermes format: calls in order, every unreadable call told, reasoning left alone, linear time."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.chat import HermesToolParser

PARSER = HermesToolParser()


def block(body):
    return f"<tool_call>\n{body}\n</tool_call>"


def call(name="f", **arguments):
    return block(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))


def read(text):
    parsed = PARSER.parse(text)
    return [(c.name, json.loads(c.arguments)) for c in parsed.calls], parsed.errors, parsed.content


def test_several_calls_keep_their_order_and_the_text_between():
    calls, errors, content = read(f"a {call('one')} b {call('two')}{call('one')} c")
    assert [name for name, _ in calls] == ["one", "two", "one"]
    assert (errors, content) == ([], "a  b  c")


def test_arguments_keep_their_characters():
    assert PARSER.parse(call("f", q="北京")).calls[0].arguments == '{"q": "北京"}'


def test_arguments_may_be_a_json_string_that_holds_an_object():
    assert read(block('{"name": "f", "arguments": "{\\"a\\": 1}"}'))[0] == [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "invalid JSON"),
        ('{"name": "f", "arguments": {}', "invalid JSON"),
        ("{'name': 'f', 'arguments': {}}", "invalid JSON"),
        ('{"name": "f", "arguments": {}} and more', "invalid JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "the key 'a' is given twice"),
        ('{"name": "f", "name": "g", "arguments": {}}', "the key 'name' is given twice"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "out of range"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "out of range"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 200_000 + "]" * 200_000 + "}}", "deeply"),
        ('[{"name": "f"}]', "one JSON object"),
        ("null", "one JSON object"),
        ('{"arguments": {}}', '"name" is missing'),
        ('{"name": "", "arguments": {}}', '"name" is missing'),
        ('{"name": 1, "arguments": {}}', '"name" is missing'),
        ('{"name": "f"}', '"arguments" is missing'),
        ('{"name": "f", "arguments": [1]}', "must be a JSON object"),
        ('{"name": "f", "arguments": null}', "must be a JSON object"),
        ('{"name": "f", "arguments": "Paris"}', "must be a JSON object"),
        ('{"name": "f", "arguments": "[1]"}', "must be a JSON object"),
    ],
)
def test_unreadable_calls_are_told_in_one_short_line(body, reason):
    calls, errors, content = read(f"{call('before')}{block(body)}{call('after')}")
    assert [name for name, _ in calls] == ["before", "after"]
    assert len(errors) == 1
    assert reason in errors[0]
    assert errors[0].startswith("tool call 2 ")
    assert "\n" not in errors[0]
    assert len(errors[0]) < 200
    assert content == ""


def test_unclosed_blocks():
    whole = call("f", a=1)
    assert read(whole.removesuffix("</tool_call>"))[1] == [
        "tool call 1 was not read: it is not closed; end it with </tool_call>"
    ]
    calls, errors, _ = read(f"<tool_call>{whole}")
    assert calls == [("f", {"a": 1})]
    assert len(errors) == 1
    assert read('<tool_call>{"name": "f')[2] == ""


def test_a_bad_string_does_not_swallow_the_next_call():
    calls, errors, _ = read(block('{"name": "f, "arguments": {}}') + call("g", a='"'))
    assert calls == [("g", {"a": '"'})]
    assert len(errors) == 1


def test_reasoning_that_the_prompt_opened():
    calls, errors, content = read(f"maybe {call('no')} <tool_call>oops</tool_call></think>{call('yes')} done")
    assert [name for name, _ in calls] == ["yes"]
    assert errors == []
    assert content.startswith("maybe <tool_call>")
    assert content.endswith("</think> done")
    # Only the first one closes a thought, and only where no thought was opened in the text.
    assert [name for name, _ in read(f"<think></think>{call('a')}</think>{call('b')}")[0]] == ["a", "b"]
    assert [name for name, _ in read(f"</think>{call('a')}</think>{call('b')}")[0]] == ["a", "b"]


LOST = "it stands in a thought; end the thought with </think> and write the call after it"


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (f"<think>a {call('no')}</think>", 1),
        (f"<think>a {call('no')}", 1),
        (f"a {call('no')}{call('no')}</think>\n", 2),
        (f"<think>a {call('no')}</think> <think>so</think>", 1),
        (f"<think>a <think> {call('no')}", 1),
        ("<think>a <tool_call>{</think>", 1),
        (f"<think>a {call('no')}</think> The answer is 7.", 0),
        (f"a {call('no')}</think> The answer is 7.", 0),
        ("<think>a</think>", 0),
        (f"{call('no')}\nNote the </think> tag.", 1),
        (f"{call('no')}{call('no')}</think> The answer is 7.", 2),
        (f"<think>{call('no')}</think> The answer is 7.", 0),
        (block("{bad") + "</think> The answer is 7.", 0),
    ],
)
def test_a_call_in_a_thought_is_told_where_the_model_waits_in_vain(text, errors):
    calls, told, content = read(text)
    assert (calls, [error.partition("read: ")[2] for error in told]) == ([], [LOST] * errors)
    assert content == text.strip()
    if "</think>" in text:
        assert read(text + call("yes"))[:2] == ([("yes", {})], [])


def test_a_call_in_a_last_thought_is_told_beside_one_that_was_read():
    calls, errors, _ = read(f"{call('yes')}<think>maybe {call('no')}</think>")
    assert ([name for name, _ in calls], len(errors)) == (["yes"], 1)


def test_tags_of_thoughts_inside_arguments_are_text():
    assert read(call("f", a="</think>") + call("g", a="<think>"))[0] == [
        ("f", {"a": "</think>"}),
        ("g", {"a": "<think>"}),
    ]


@given(
    st.lists(
        st.sampled_from(
            [call("f", a=1), block("{bad}"), block('{"name": "f"}'), "<tool_call>{", "text", "</tool_call>"]
        )
        | st.text(alphabet="ab{}:, \n", max_size=8),
        max_size=15,
    ),
    st.sampled_from(["", "<think>x <tool_call> y</think>", f"{call('no')}</think>"]),
)
def test_every_opening_tag_outside_reasoning_is_a_call_or_an_error(pieces, reasoning):
    text = "".join(pieces)
    calls, errors, _ = read(reasoning + text)
    lost = "<tool_call>" in reasoning and not text.strip()  # the turn ends with a thought that calls
    lost |= reasoning.startswith("<tool_call>") and "<tool_call>" not in text  # or begins with a call, and has no other
    assert len(calls) + len(errors) == text.count("<tool_call>") + lost
    assert len(calls) == text.count(call("f", a=1))


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "</think>",
        "<think>",
        "<think></think>",
        "<think></think>\n \n",
        "<think><tool_call></think> ",
        "<tool_call>[[[",
        '<tool_call>{"a":"\\"',
        '<tool_call>{\\"',
        '<tool_call>"x"',
        '<tool_call>{"a":"b","',
        '"<tool_call>\\',
        '<tool_call>"</tool_call>"',
    ],
)
def test_hostile_repetition_ends(unit):
    count = 200_000 // len(unit)  # a quadratic reader would need minutes
    for text in (unit * count, "<tool_call>" + unit * count):
        parsed = PARSER.parse(text)
        assert len(parsed.errors) <= count + 1
        assert not parsed.calls
