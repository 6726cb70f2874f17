"""A turn that is read while it is written: the same words and thoughts come out as are read of the whole, however it is cut
into pieces, and nothing of a call among them."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parsers_formats import FORMATS, schemas
from test_parsers_round_trips import CALLS, sayable

from etude.chat import TOOL_PARSERS, ToolParser
from etude.chat.parsers.blocks import BlockParser
from etude.chat.parsers.streaming import BlockStream

WORDS = st.sampled_from(["Hm", " ", "\n\n", "a <b> c", "日本", "🙂", "[1]", "{", "5.", "<", "</", "<th", "<tool"])
OURS = "etude."  # other tests register formats, too
NAMES = [n for n in TOOL_PARSERS.names() if n != "auto" and TOOL_PARSERS.get(n).__module__.startswith(OURS)]


def tags_of(parser):
    kind = TOOL_PARSERS.get(parser)
    if not issubclass(kind, BlockParser):
        return []
    return [*kind.opening, *kind.closing, *kind.glue, *(tag for pair in kind.reasoning_tags for tag in pair)]


def streamed(name, pieces, thinking=False):
    """(what came out, in order; the stream)."""
    stream = ToolParser.get_tool_parser(name).stream(thinking)
    said = [each for piece in pieces for each in stream.feed(piece)] + stream.close()
    for kind, text in stream.emitted.items():
        assert text == "".join(words for each, words in said if each == kind)
    return merged(said), stream


def merged(said):
    out = []
    for kind, text in said:
        if out and out[-1][0] == kind:
            out[-1] = (kind, out[-1][1] + text)
        else:
            out.append((kind, text))
    return out


@pytest.mark.parametrize("label", FORMATS)
@settings(max_examples=15)
@given(calls=CALLS, before=st.lists(WORDS, max_size=4), thought=st.lists(WORDS, max_size=4), data=st.data())
def test_words_and_thoughts_come_out_and_calls_do_not(label, calls, before, thought, data):
    style = FORMATS[label]
    assume(sayable(style, calls))
    written, thinking = style.render(calls), False
    if style.around and style.name != "gpt_oss":
        opening, closing = TOOL_PARSERS.get(style.name).reasoning_tags[0]
        thinking = data.draw(st.booleans())
        written = f"{'' if thinking else opening}{''.join(thought)}{closing}{''.join(before)}{written}"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=8)))
    pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)])]
    said, stream = streamed(style.name, pieces, thinking)
    parsed = ToolParser.get_tool_parser(style.name).parse(written, schemas(calls))
    assume(not parsed.errors)
    assert len(parsed.calls) == len(calls)
    assert said == streamed(style.name, [written], thinking)[0] == streamed(style.name, list(written), thinking)[0]
    assert parsed.reasoning.startswith(stream.emitted["reasoning"])
    assert thinking or parsed.reasoning == stream.emitted["reasoning"]
    assert parsed.spoken.startswith(stream.emitted["content"])
    assert style.opening not in stream.emitted["content"]


@pytest.mark.parametrize("name", [name for name in NAMES if tags_of(name)])
@settings(max_examples=30)
@given(data=st.data(), thinking=st.booleans())
def test_whatever_a_model_writes_what_is_certain_stays(name, data, thinking):
    parts = data.draw(st.lists(st.sampled_from(tags_of(name)) | WORDS, max_size=8))
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    said, stream = streamed(name, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])], thinking)
    assert said == streamed(name, [text], thinking)[0]
    kind = TOOL_PARSERS.get(name)
    thoughts = dict(kind.reasoning_tags)
    marks = [part for part in parts if part in {*thoughts, *thoughts.values(), *kind.opening}]
    assume(not thinking and (not marks or marks[0] not in thoughts.values()))
    assume(not marks or marks[0] not in kind.opening or not set(marks) & set(thoughts.values()))
    parsed = ToolParser.get_tool_parser(name).parse(text)
    assert parsed.reasoning.startswith(stream.emitted["reasoning"])
    assert parsed.spoken.startswith(stream.emitted["content"])


def test_the_stream_says_words_before_the_turn_ends():
    stream = ToolParser.get_tool_parser("hermes").stream()
    assert stream.feed("<think>\nTwo") == [("reasoning", "Two")]
    assert stream.feed(" and ") == [("reasoning", " and")]
    assert stream.feed("three </th") == [("reasoning", " three")]
    assert stream.feed("ink>\n\n") == []
    assert stream.feed("So: <tool") == [("content", "So:")]
    assert stream.feed("s") == [("content", " <tools")]
    assert stream.feed(" <tool_call>") == []
    assert stream.feed('{"name": "f"') == []
    assert stream.close() == []
    assert stream.rest == ' <tool_call>{"name": "f"'


def test_a_thought_that_the_prompt_opened():
    parser = ToolParser.get_tool_parser("hermes")
    assert parser.opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not parser.opens_reasoning("<think>\n\n</think>\n\n")
    stream = parser.stream(thinking=True)
    assert stream.feed("Two") == [("reasoning", "Two")]
    assert stream.feed("\n</think>Five") == [("content", "Five")]


def test_harmony_says_its_final_channel_and_holds_calls():
    stream = ToolParser.get_tool_parser("gpt_oss").stream()
    assert stream.feed("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|chan") == [("reasoning", "Hm.")]
    assert stream.feed("nel|>commentary<|message|>I look") == [("content", "I look")]
    assert stream.feed(" up.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|message|>{}") == [
        ("content", " up.")
    ]
    assert stream.feed("<|call|>") == stream.close() == []
    assert not ToolParser.get_tool_parser("gpt_oss").stream().feed(" to=functions.f<|channel|>commentary")


@settings(max_examples=50)
@given(data=st.data())
def test_harmony_streams_what_is_read_however_it_is_cut(data):
    messages = data.draw(st.lists(st.tuples(st.sampled_from(["analysis", "final", "commentary"]), WORDS), max_size=4))
    text = "<|start|>assistant".join(f"<|channel|>{name}<|message|>{said}<|end|>" for name, said in messages)
    text += data.draw(
        st.sampled_from(["", "<|start|>assistant to=functions.f<|channel|>analysis json<|message|>{}<|call|>"])
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    said, stream = streamed("gpt_oss", [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])])
    assert said == streamed("gpt_oss", list(text))[0]
    parsed = ToolParser.get_tool_parser("gpt_oss").parse(text)
    assert (parsed.reasoning, parsed.spoken) == (stream.emitted["reasoning"], stream.emitted["content"])


@pytest.mark.parametrize("name", NAMES)
def test_every_format_of_ours_streams(name):
    words = "<|channel|>final<|message|>It is" if name in ("gpt_oss", "gpt-oss", "harmony") else "It is"
    assert ToolParser.get_tool_parser(name).stream().feed(words) == [("content", "It is")]


def test_a_parser_that_says_nothing_about_its_tags_is_certain_of_nothing():
    class Mine(ToolParser):
        def parse(self, text, tools=None): ...

    stream = Mine().stream()
    assert stream.feed("It is five.") == stream.close() == []
    assert stream.rest == "It is five."
    assert not isinstance(stream, BlockStream)
