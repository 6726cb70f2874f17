"""A turn is split into reasoning and the rest as it is parsed; calls stay in the rest as they were written."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parsers_formats import FORMATS
from test_parsers_round_trips import CALLS, sayable

from etude.chat import TOOL_PARSERS, ToolParser
from etude.chat.parsers.blocks import BlockParser

WORDS = st.sampled_from(["Hm", " ", "\n\n", "a <b> c", "日本", "🙂", "[1]", "5.", "<", "</", "<th", "<tool"])
OURS = "etude."  # other tests register formats, too
BLOCKS = [
    name
    for name in TOOL_PARSERS.names()
    if TOOL_PARSERS.get(name).__module__.startswith(OURS) and issubclass(TOOL_PARSERS.get(name), BlockParser)
]


@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=30)
@given(data=st.data())
def test_a_turn_without_calls_is_split_as_it_is_parsed(name, data):
    kind = TOOL_PARSERS.get(name)
    tags = [*(set(kind.glue) - set(kind.sections)), *(tag for pair in kind.reasoning_tags for tag in pair)]
    text = "".join(data.draw(st.lists(st.sampled_from(tags) | WORDS, max_size=8)))
    parser = ToolParser.get_tool_parser(name)
    parsed = parser.parse(text)
    assume(not parsed.calls and not parsed.errors and not any(tag in text for tag in kind.opening))
    assert parser.split_reasoning(text) == (parsed.reasoning, parsed.spoken)


@pytest.mark.parametrize("label", [n for n, style in FORMATS.items() if style.around and style.name != "gpt_oss"])
@settings(max_examples=15)
@given(calls=CALLS, before=st.lists(WORDS, max_size=4), thought=st.lists(WORDS, max_size=4), opened=st.booleans())
def test_calls_stay_in_the_rest_as_they_were_written(label, calls, before, thought, opened):
    style = FORMATS[label]
    assume(sayable(style, calls))
    opening, closing = TOOL_PARSERS.get(style.name).reasoning_tags[0]
    written = style.render(calls)
    text = f"{'' if opened else opening}{''.join(thought)}{closing}{''.join(before)}{written}"
    parser = ToolParser.get_tool_parser(style.name)
    reasoning, rest = parser.split_reasoning(text, opened)
    assert reasoning == "".join(thought).strip()
    assert rest == ("".join(before) + written).strip()


def test_reasoning_that_the_prompt_opened_ends_with_its_tag_or_with_a_call():
    parser = ToolParser.get_tool_parser("hermes")
    assert parser.opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not parser.opens_reasoning("<think>\n\n</think>\n\n")
    assert parser.split_reasoning("Two\n</think>Five", opened=True) == ("Two", "Five")
    assert parser.split_reasoning("Two and", opened=True) == ("Two and", "")
    assert parser.split_reasoning("Two <tool_call>{", opened=True) == ("Two", "<tool_call>{")


def test_harmony_is_split_by_its_channels():
    parser = ToolParser.get_tool_parser("gpt_oss")
    head = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
    call = "<|start|>assistant<|channel|>commentary to=functions.f <|message|>{}<|call|>"
    assert parser.split_reasoning(head + "<|end|>") == ("Hm.", "I look.")
    assert parser.split_reasoning(f"{head}<|end|>{call}") == ("Hm.", "I look." + call)


def test_a_parser_without_tags_has_no_reasoning():
    class Mine(ToolParser):
        def parse(self, text, tools=None): ...

    assert Mine().split_reasoning(" <think>It is</think> five.\n", opened=True) == ("", "<think>It is</think> five.")
