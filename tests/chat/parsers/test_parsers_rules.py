"""Search-R1's bare queries, RL-Factory's rules, the choice by template, and formats whose tags are special tokens."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsers_formats import FORMATS, calls_of, parse

from etude.chat import HermesToolParser, ToolParser
from etude.chat.parsers import AutoToolParser, format_of
from etude.chat.parsers.rl_factory import EMPTY_TOOL, final_answer, read_tools
from etude.errors import ConfigError
from etude.models import build_tiny_tokenizer


def tool(name, **properties):
    required = {"required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties, **required}}}


TEXT, TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
SEARCH = tool("web_search", query=TEXT, topk={"type": "integer"})


@pytest.mark.parametrize(
    ("tools", "call"),
    [
        (None, ("search", {"query": "red panda"})),
        ([SEARCH], ("web_search", {"query": "red panda"})),
        (
            [tool("add", a={"type": "integer"}), tool("search", query_list=TEXTS)],
            ("search", {"query_list": ["red panda"]}),
        ),
        ([SEARCH, tool("search", q=TEXT)], ("search", {"q": "red panda"})),
        ([{"name": "find", "parameters": {"properties": {"what": TEXT}}}], ("find", {"what": "red panda"})),
    ],
)
def test_a_bare_query_goes_to_the_tool_that_takes_one_text(tools, call):
    for written in ("<search> red panda </search>", "<tool_call> red panda </tool_call>"):
        parsed = parse("search_r1", f"<think>I need it. <search>no</search></think>{written}", tools)
        assert (calls_of(parsed), parsed.errors) == ([call], [])


def test_results_come_in_tags_where_the_query_did():
    found = parse("search_r1", "<search>x</search>")
    assert found.result_message("Doc 1") == {"role": "user", "content": "<information>Doc 1</information>"}
    assert parse("search_r1", "<search>").result_message("why")["role"] == "user"
    found = parse("search_r1", "<tool_call>x</tool_call>")
    assert found.result_message("Doc 1") == {"role": "tool", "content": "Doc 1"}
    assert parse("hermes", "").result_message("x") == {"role": "tool", "content": "x"}


def test_an_answer_ends_unless_a_search_came_first():
    ended = parse("search_r1", "<answer> Beijing </answer><search>x</search>")
    assert (ended.calls, ended.errors) == ([], [])
    assert "<answer> Beijing </answer>" in ended.content
    assert calls_of(parse("search_r1", "<search>x</search><answer>y</answer>")) == [("search", {"query": "x"})]
    assert calls_of(parse("search_r1", "<think><answer>y</answer></think><search>x</search>"))
    assert parse("search_r1", "just words").content == "just words"


def test_a_search_in_a_thought_that_ends_the_turn_is_told():
    for written in ("<think>hm <search>x</search>", "<think>hm <search>x</search></think>"):
        parsed = parse("search_r1", written)
        assert (parsed.calls, len(parsed.errors), parsed.result_tag) == ([], 1, "information")
        assert "it stands in a thought" in parsed.errors[0]


def test_objects_in_tool_call_tags_are_calls():
    written = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert calls_of(parse("search_r1", written, [SEARCH])) == [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("written", "tools", "reason"),
    [
        ("<search></search>", None, "the query is empty"),
        ("<search>x", None, "end it with </search>"),
        ("<tool_call>x</search>", None, "end it with </tool_call>"),
        ("<search>x</search>", [tool("add", a={"type": "integer"})], "none of the tools takes a single text"),
        ("<search>x</search>", [], "none of the tools takes a single text"),
        ('<tool_call>{"name": 1}</tool_call>', None, '"name" is missing'),
    ],
)
def test_queries_that_cannot_be_asked_are_told(written, tools, reason):
    parsed = parse("search_r1", written, tools)
    assert parsed.calls == []
    assert len(parsed.errors) == 1
    assert reason in parsed.errors[0]


def block(body):
    return f"<tool_call>{body}</tool_call>"


CALL = block('{"name": "f", "arguments": {"a": 1}}')


@pytest.mark.parametrize(
    "body",
    [
        "{'name': 'f', 'arguments': {'a': 1}}",
        '{name: "f", arguments: {a: 1,},}',
        '// look\n{"name": "f", /* so */ "arguments": {"a": 0x1}}',
    ],
)
def test_json5_is_read(body):
    assert calls_of(parse("rl_factory", block(body))) == [("f", {"a": 1})]
    assert parse("hermes", block(body)).errors


@pytest.mark.parametrize(
    ("text", "calls", "answer"),
    [
        (CALL, 1, None),
        (f"{CALL}<answer>7</answer>", 0, "7"),
        (f"<answer>7</answer>{CALL}", 0, "7"),
        (f"<think><answer>7</answer></think>{CALL}", 1, None),
        (f"<think>{CALL}</think><answer> 7 </answer>", 0, "7"),
        (f"so <answer>7</answer></think>{CALL}", 1, None),
        ("<answer>6</answer><answer>7</answer>", 0, "7"),
        ("<answer>7", 0, None),
        ("words", 0, None),
    ],
)
def test_an_answer_wins_over_calls_or_loses_as_configured(text, calls, answer):
    assert len(parse("rl_factory", text).calls) == calls
    assert parse("rl_factory", text).errors == []
    assert len(parse("rl_factory_calls_first", text).calls) == text.replace(f"<think>{CALL}", "").count("<tool_call>")
    assert final_answer(text) == answer


def test_what_cannot_be_read_is_the_empty_tool():
    good = {"name": "f", "args": '{"a": 1}'}
    text = f"{CALL}{block('')}{block('{bad')}{block('{}')}{block(json.dumps({'name': 'f'}))}{CALL}<tool_call>{{"
    assert read_tools(text) == [good, EMPTY_TOOL, EMPTY_TOOL, EMPTY_TOOL, EMPTY_TOOL, good, EMPTY_TOOL]
    assert EMPTY_TOOL == {"name": "<empty>", "args": "# Extract the tool name failed"}
    assert len(parse("rl_factory", text).errors) == 5
    assert read_tools(f"<think>{CALL}</think> words") == []
    assert read_tools(f"<think>{CALL}</think>") == [EMPTY_TOOL]


@given(st.text(alphabet="{}[]'\":,/*\\ab1 \n", max_size=40))
def test_no_body_breaks_the_reader_of_json5(body):
    parsed = parse("rl_factory", block(body))
    assert len(parsed.calls) + len(parsed.errors) == 1


def test_a_long_body_is_not_given_to_the_reader_of_json5():
    parsed = parse("rl_factory", block("{'name': 'f', 'arguments': {'a': '" + "x" * 6000 + "'}}"))
    assert "invalid JSON" in parsed.errors[0]


TEMPLATES = {
    "hermes": "<tool_call>\n{{ call | tojson }}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>",
    "glm4_moe": "<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json",
    "deepseek_v31": "<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>",
    "kimi_k2": "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "gpt_oss": "<|start|>assistant<|channel|>commentary to=functions.{{ name }}<|message|>",
    "minimax_m2": '<minimax:tool_call><invoke name="{{ name }}">',
    "seed_oss": "<seed:tool_call><function={{ name }}>",
    "mistral": "[TOOL_CALLS]{{ calls }}",
    "internlm2": "<|action_start|><|plugin|>",
    "cohere": "<|START_ACTION|>[",
    "granite": "<|start_of_role|>assistant<|end_of_role|><tool_call>",
    "phi4": "prefix calls with functools[...]",
    "xlam": '<|start_header_id|>[{"name": "tool_call_name", "arguments": {}}]',
    "pythonic": "<|start_header_id|>Respond in the format [func_name1(params_name1=params_value1)]",
    "gemma": "<|tool_call>call:{{ name }}",
    "llama3_json": '<|start_header_id|>{"name": "", "parameters": {}}',
    "llama4_pythonic": "<|python_start|>[",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_its_format(name):
    assert format_of("{{ messages }} " + TEMPLATES[name]) == name


def test_a_template_without_calls_is_refused():
    with pytest.raises(ConfigError, match=r"shows no known tool-call format; set one of .*cohere, .*hermes"):
        format_of("{{ messages }}")
    with pytest.raises(ConfigError, match="needs a tokenizer with a chat template"):
        ToolParser.get_tool_parser("auto")


def special(text, *tokens):
    """A tokenizer in which `tokens` are special, and the ids of `text` with an end of turn."""
    tokenizer = build_tiny_tokenizer([text], 400)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return tokenizer, tokenizer(text + tokenizer.eos_token, add_special_tokens=False)["input_ids"]


def test_the_tiny_tokenizers_template_is_hermes():
    parser = ToolParser.get_tool_parser("auto", build_tiny_tokenizer(["x"], 300))
    assert type(parser.parser) is HermesToolParser
    assert calls_of(parser.parse(CALL)) == [("f", {"a": 1})]


async def test_auto_reads_as_the_parser_that_it_stands_for():
    text = FORMATS["kimi_k2"].render([("f", {"a": "é"})])
    tokenizer, ids = special(text, *ToolParser.get_tool_parser("kimi_k2").special_tokens)
    tokenizer.chat_template = TEMPLATES["kimi_k2"]
    parser = ToolParser.get_tool_parser("auto", tokenizer)
    assert isinstance(parser, AutoToolParser)
    parsed = await parser.parse_ids(ids)
    assert (calls_of(parsed), parsed.errors, parsed.content) == ([("f", {"a": "é"})], [], "")


TAGGED = [
    label for label, style in FORMATS.items() if ToolParser.get_tool_parser(style.name).special_tokens and style.around
]


@pytest.mark.parametrize("label", TAGGED)
async def test_tags_that_are_special_tokens_are_read_from_ids(label):
    style = FORMATS[label]
    text = style.render([("f", {"a": "x"}), ("g", {})])
    name = style.name
    tokenizer, ids = special(text, *ToolParser.get_tool_parser(name).special_tokens)
    parsed = await ToolParser.get_tool_parser(name, tokenizer).parse_ids(ids)
    assert (calls_of(parsed), parsed.errors) == ([("f", {"a": "x"}), ("g", {})], [])
    assert parsed.content == ""


def test_stop_tokens_are_those_the_tokenizer_has():
    tokenizer, _ = special("x", "<|call|>")
    assert ToolParser.get_tool_parser("gpt_oss", tokenizer).stop_token_ids == (
        tokenizer.convert_tokens_to_ids("<|call|>"),
    )
    assert ToolParser.get_tool_parser("gpt_oss").stop_token_ids == ()
    tokenizer, ids = special("<search>x</search>", "<search>", "</search>")
    parser = ToolParser.get_tool_parser("search_r1", tokenizer)
    assert parser.stop_token_ids == (tokenizer.convert_tokens_to_ids("</search>"),)
    assert calls_of(parser.parse(parser.decode(ids))) == [("search", {"query": "x"})]
    tokenizer, _ = special("x")
    assert ToolParser.get_tool_parser("hermes", tokenizer).stop_token_ids == ()


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "spoken"),
    [
        ("hermes", "<think>a plan</think>One moment.<tool_call>{}</tool_call>", "a plan", "One moment."),
        ("hermes", "a plan</think>One moment.", "a plan", "One moment."),
        ("hermes", "<think>a plan", "a plan", ""),
        ("hermes", "One moment.", "", "One moment."),
        ("seed_oss", "<seed:think>a plan</seed:think>One moment.", "a plan", "One moment."),
        ("llama3_json", '<think>a plan</think>{"name": "f", "parameters": {}}', "a plan", ""),
        ("search_r1", "<think>a plan</think><answer>4</answer>", "a plan", "<answer>4</answer>"),
        ("rl_factory", "<think>a plan</think><answer>4</answer>", "a plan", "<answer>4</answer>"),
    ],
)
def test_reasoning_is_told_from_what_is_spoken(name, text, reasoning, spoken):
    parsed = parse(name, text)
    assert (parsed.reasoning, parsed.spoken) == (reasoning, spoken)


@pytest.mark.parametrize("around", ["{%s}", "{ %s }", "\\boxed{%s}", '{"k": 1, %s}', "Sure:\n{%s} {}", "f(){ %s }"])
def test_a_call_in_braces_that_are_no_json_is_a_call(around):
    parsed = parse("llama3_json", around % '{"name": "f", "parameters": {"a": {"b": 1}}}')
    assert (calls_of(parsed), parsed.errors) == ([("f", {"a": {"b": 1}})], [])


@pytest.mark.parametrize(
    "first", ['"n": 1', '"k": 1', '"n": 1e400'], ids=["plain", "a key twice", "too large a number"]
)
def test_objects_in_an_object_are_an_answer(first):
    text = f'For example {{{first}, "k": {{"name": "f", "parameters": {{}}}}}} is an object.'
    parsed = parse("llama3_json", text)
    assert (parsed.calls, parsed.errors, parsed.content) == ([], [], text)


def test_a_text_in_which_json_has_a_key_twice_is_a_text_where_one_is_allowed():
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": ["string", "object"]}}}}
    text = '<tool_call><function=f><parameter=a>{"x":1,"x":2}</parameter></function></tool_call>'
    assert calls_of(parse("qwen3_coder", text, [tool])) == [("f", {"a": '{"x":1,"x":2}'})]
    tool["parameters"]["properties"]["a"]["type"] = "object"
    assert "the key 'x' is given twice" in parse("qwen3_coder", text, [tool]).errors[0]


ELEMENTS = {
    "qwen3_coder": ("<tool_call><function=f><parameter=a>", "1</parameter></function></tool_call>", "</think>"),
    "seed_oss": (
        "<seed:tool_call><function=f><parameter=a>",
        "1</parameter></function></seed:tool_call>",
        "</seed:think>",
    ),
    "minimax_m2": (
        '<minimax:tool_call><invoke name="f"><parameter name="a">',
        "1</parameter></invoke></minimax:tool_call>",
        "</think>",
    ),
    "glm4_moe": ("<tool_call>f<arg_key>a</arg_key><arg_value>", "1</arg_value></tool_call>", "</think>"),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_a_mention_in_a_thought_that_the_prompt_opened_takes_nothing_with_it(name):
    begin, end, closing = ELEMENTS[name]
    parsed = parse(name, f"I write {begin} then the value.{closing}\n{begin}{end}", [tool("f", a=TEXT)])
    assert (calls_of(parsed), parsed.errors) == ([("f", {"a": "1"})], [])


@pytest.mark.parametrize("wrong", [{"allOf": 5}, {"anyOf": 5}, {"enum": 5}, {"type": [{}]}, {"type": 5}])
def test_a_schema_that_makes_no_sense_leaves_text(wrong):
    begin, end, _ = ELEMENTS["qwen3_coder"]
    assert calls_of(parse("qwen3_coder", begin + end, [tool("f", a=wrong)])) == [("f", {"a": "1"})]
