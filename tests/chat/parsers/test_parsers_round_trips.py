"""Every format, both ways: what a model writes is read as it was meant, however hostile the texts in it are."""

import json
import keyword
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parsers_formats import FORMATS, Format, schemas

from etude.chat import TOOL_PARSERS, ToolParser

TAGS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<|python_end|>", "[TOOL_CALLS]", "[ARGS]",
    "<｜tool▁call▁end｜>", "<|tool_call_end|>", "<|call|>", "<|start|>", "<|message|>", "functools[", "<|action_end|>",
    "```", "```json", "<|END_ACTION|>", "<tool_call|>", "<escape>", '<|"|>', "</parameter>", "</arg_value>",
    "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">',
    "</invoke>", "</function>", "<parameter", "<arg_key>", "<arg_value>", "<answer>", "</answer>", "<function=f>",
    "<search>", '"', "'", "\\", "{", "}", "[", "]", '{"name": "g"', "\n", "\t", "\x00", "北京", "🙂", ":", ",", ";", "<",
    "null", "1", "true", "\\u0041",
]  # fmt: skip
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
TEXTS = st.lists(st.sampled_from(TAGS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=6).map(
    "".join
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = TEXTS | st.integers(-(10**20), 10**20) | st.booleans() | st.none() | FLOATS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=3, unique_by=lambda c: c[0]
)


def texts_in(value):
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts_in(each)


def sayable(style, calls, cut=False):
    """Whether the format can write these calls at all, or so that they may be cut."""
    unsayable = (*style.unsayable, *style.uncuttable) if cut else style.unsayable
    for _, arguments in calls:
        for text in texts_in(arguments):
            if any(mark in text for mark in unsayable):
                return False
            if style.trims and text.strip("\n") != text:
                return False
    return True


def read(style, text, tools):
    parsed = ToolParser.get_tool_parser(style.name).parse(text, tools)
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls], parsed


@pytest.mark.parametrize("label", FORMATS)
@settings(max_examples=20)
@given(calls=CALLS)
def test_what_was_written_is_read(label, calls):
    style = FORMATS[label]
    assume(sayable(style, calls))
    found, parsed = read(style, style.render(calls), schemas(calls))
    assert parsed.errors == []
    assert found == calls
    assert parsed.content == ""


OWN = {type(ToolParser.get_tool_parser(name)): name for name in TOOL_PARSERS.names() if name != "auto"}
WRITERS = sorted(name for parser, name in OWN.items() if parser.__module__.startswith("etude."))


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=20)
@given(calls=CALLS)
def test_what_a_parser_writes_it_reads(name, calls):
    parser = ToolParser.get_tool_parser(name)
    styles = [style for style in FORMATS.values() if type(ToolParser.get_tool_parser(style.name)) is type(parser)]
    if name in ("rl_factory", "search_r1"):  # their prompts teach plain text, in which tags have no other spelling
        tags = [
            f"{begin}{tag}>"
            for begin in ("<", "</")
            for tag in ("answer", "tool_call", "search", "think", "information")
        ]
        styles = [Format("", None, "", tuple(tags))]
    assume(all(sayable(style, calls) for style in styles))
    parsed = parser.parse(parser.write(calls, schemas(calls)), schemas(calls))
    assert parsed.errors == []
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
    assert parsed.content == ""


@pytest.mark.parametrize("label", FORMATS)
@settings(max_examples=12)
@given(calls=CALLS, share=st.floats(0, 1))
def test_a_call_cut_short_is_never_lost_and_never_another_call(label, calls, share):
    style = FORMATS[label]
    assume(sayable(style, calls, cut=True))
    whole = style.render(calls)
    text = whole[: int(share * len(whole))]
    found, parsed = read(style, text, schemas(calls))
    if not style.lenient:
        assert found == calls[: len(found)]
    elif len(found) > 1:
        assert found[:-1] == calls[: len(found) - 1]
    if style.opening in text:
        assert (
            found or parsed.errors or parsed.reasoning or not style.around
        )  # an argument may hold the end of a thought
    else:
        assert not found


@pytest.mark.parametrize("label", [label for label, style in FORMATS.items() if style.around])
def test_words_around_calls_are_content(label):
    style = FORMATS[label]
    calls = [("first", {"q": "x"}), ("second", {})]
    found, parsed = read(style, f"<think>hm</think>Let me see. {style.render(calls)} Done.", schemas(calls))
    assert found == calls
    assert parsed.errors == []
    assert parsed.content.startswith("<think>hm</think>Let me see.")
    assert parsed.content.endswith("Done.")
    assert "first" not in parsed.content


THINKERS = [label for label in FORMATS if label not in ("gpt_oss", "gpt_oss head", "cohere")]


@pytest.mark.parametrize("label", THINKERS)
def test_reasoning_is_never_read_for_calls(label):
    style = FORMATS[label]
    calls = [("f", {"a": "x"})]
    text = style.render(calls)
    for thought in (f"<think>maybe {text}</think>", f"maybe {text} or not</think>"):
        if style.around or thought.startswith("<"):
            found, parsed = read(style, thought + text, schemas(calls))
            assert (found, parsed.errors) == (calls, []), thought
    if style.around:
        assert read(style, f"<think>maybe {text}", schemas(calls))[0] == []


@pytest.mark.parametrize("label", THINKERS)
@settings(max_examples=15)
@given(calls=CALLS, closing=st.sampled_from(["", "</think>", "</think>\n", "</think><think>so</think>"]))
def test_calls_in_a_thought_that_ends_the_turn_are_told(label, calls, closing):
    style = FORMATS[label]
    text = style.render(calls)
    assume(sayable(style, calls) and "think>" not in text)
    for thought in (f"<think>{text}{closing}", f"{text}{closing}" if closing else "</think>"):
        found, parsed = read(style, thought, schemas(calls))
        assert found == []
        assert len(parsed.errors) == (len(calls) if thought != "</think>" else 0)
        assert all("it stands in a thought" in error for error in parsed.errors)
        found, parsed = read(style, f"{thought}{text}", schemas(calls))
        assert (found, parsed.errors) == ((calls, []) if closing or thought == "</think>" else ([], parsed.errors))


ANSWERS = st.dictionaries(NAMES.filter(lambda name: name != "name"), VALUES, min_size=1, max_size=3)


@settings(max_examples=30)
@given(answer=ANSWERS, name=NAMES, words=st.sampled_from(["", "Here: ", "</think>", "a {b} "]))
def test_a_call_inside_an_answer_that_is_json_is_none(answer, name, words):
    quoted = {"answer": answer, "calls": [{"name": name, "parameters": answer}], "of": {"arguments": {}, "name": name}}
    text = words + json.dumps(quoted, ensure_ascii=False)
    parsed = ToolParser.get_tool_parser("llama3_json").parse(text)
    assert (parsed.calls, parsed.errors, parsed.content) == ([], [], text.strip())


@settings(max_examples=30)
@given(calls=CALLS, words=st.sampled_from(["Let me look. ", "Of {x} ", '{"a": 1} ']))
def test_calls_among_words_hold_any_text(calls, words):
    written = " and ".join(json.dumps({"id": "c", "name": n, "parameters": g}, ensure_ascii=False) for n, g in calls)
    found, parsed = read(FORMATS["llama3_json"], f"{words}{written}", None)
    assert (found, parsed.errors) == (calls, [])
    assert parsed.content == f"{words}{' and ' * (len(calls) - 1)}".strip()


BFCL = Path(__file__).parents[4] / "shared" / "data" / "bfcl"
KINDS = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def plain_schema(schema):
    """A schema of the leaderboard's dialect in JSON Schema's words."""
    if isinstance(schema, list):
        return [plain_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: KINDS.get(value, value) if key == "type" and isinstance(value, str) else plain_schema(value)
        for key, value in schema.items()
    }


def leaderboard():
    """(tools, the calls that are right) of real questions."""
    for name in ("parallel", "parallel_multiple", "simple_python"):
        for line in (BFCL / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            calls = [
                (function, {key: accepted[0] for key, accepted in arguments.items() if accepted[0] != ""})
                for call in row["ground_truth"]
                for function, arguments in call.items()
            ]
            yield [{"type": "function", "function": plain_schema(each)} for each in row["function"]], calls


@pytest.mark.skipif(not BFCL.is_dir(), reason="the leaderboard's questions are not beside this checkout")
@pytest.mark.parametrize("label", FORMATS)
def test_the_calls_of_a_leaderboard_are_read_in_every_format(label):
    style = FORMATS[label]
    rows = [(tools, calls) for tools, calls in leaderboard() if sayable(style, calls)]
    assert len(rows) > 700
    for tools, calls in rows:
        found, parsed = read(style, style.render(calls), tools)
        assert (found, parsed.errors) == (calls, [])


PIECES = [style.render([("f", {"a": "x", "b": [1, None]}), ("g", {})]) for style in FORMATS.values()]
MARKS = [
    *TAGS,
    *sorted({style.opening for style in FORMATS.values()}),
    "<arg_key>",
    "<arg_value>",
    "<parameter=a>",
    "to=functions.f",
]


@pytest.mark.parametrize(
    "name", sorted({style.name for style in FORMATS.values()} | {"search_r1", "rl_factory_calls_first"})
)
@settings(max_examples=20)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.sampled_from(MARKS) | st.text(max_size=5), max_size=12))
def test_no_turn_breaks_a_parser(name, pieces):
    parsed = ToolParser.get_tool_parser(name).parse("".join(pieces), schemas([("f", {"a": "x", "b": [1]}), ("g", {})]))
    assert all(isinstance(json.loads(call.arguments), dict) and call.name for call in parsed.calls)
    assert all("\n" not in error and len(error) < 400 for error in parsed.errors)
