"""What each format tells of calls that it cannot read, what it takes for text, and time that grows with the text alone."""

import json
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parsers_formats import FORMATS, calls_of, parse

from etude.chat import TOOL_PARSERS, ToolParser
from etude.schemas import OpenAIFunctionToolSchema

BROKEN = "the tag of an argument is not whole; write each argument as"


def texts(line):
    """The texts that a line or several hold, with ⏎ for a line's end in one and ␣ for a space at its end."""
    return [
        text.replace("⏎", "\n").replace("␣", " ") for each in line.strip("\n").split("\n") for text in each.split(" ‖ ")
    ]


def table(lines):
    """A row for each text of `name | reason | text ‖ text`, or of `name | text ‖ text`; what is indented goes on."""
    split = [line.split(" | ") for line in lines.replace("\n    ", "").strip().split("\n")]
    return [
        (name, text, *(BROKEN if reason == "BROKEN" else reason for reason in reasons))
        for name, *reasons, listed in split
        for text in texts(listed)
    ]


MALFORMED = [
    *table(r"""
qwen3_coder | it holds no function | <tool_call>⏎{}⏎</tool_call>
qwen3_coder | the key 'a' is given twice | <tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter>
    </function></tool_call>
deepseek_v32 | the key 'x' is given twice | <｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a"
     string="false">{"x":1,"x":2}</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>
glm4_moe | the key 'x' is given twice | <tool_call>f<arg_key>a</arg_key><arg_value>{"x":1,"x":2}</arg_value></tool_call>
hermes | the key 'a' is given twice | <tool_call>{"name": "f", "arguments": "{\"a\": 1, \"a\": 2}"}</tool_call>
qwen3_coder | the function has no name | <tool_call><function=></function></tool_call>
qwen3_coder | its tag <function= is not closed | I look. <function=get_wea
qwen3_coder | the argument 'a' is not closed before another call begins | <function=f><parameter=a>1<function=g>
qwen3_coder | nothing after it was read; end it with </parameter> | <tool_call><function=f><parameter=a>see <tool_call>
    <function=g><parameter=b>1</parameter></function></tool_call>
qwen3_coder | BROKEN | <tool_call><function=f><parameter=a⏎1⏎</parameter><parameter=b>2</parameter></function></tool_call>
qwen3_coder | BROKEN | <tool_call><function=f><parameter=b>2</parameter><parameter=a
qwen3_coder | BROKEN | <function=f><parameter name="a">1</parameter></function>
qwen3_coder | an argument is not closed | <function=f><parameter=a see <function=g></parameter><parameter=b>2
    </parameter></function>
qwen3_coder | its opening tag is not whole | <tool_call><function=f⏎<parameter=a>see <function=g></parameter>
    </function></tool_call>
qwen3_coder | its opening tag is not whole | <tool_call><parameter=a>see <function=g></parameter></tool_call>
seed_oss | the function has no name | <function=></function>
seed_oss | BROKEN | <seed:tool_call><function=f><parameter=a</parameter></function></seed:tool_call>
seed_oss | it holds no function | <seed:tool_call>get_weather</seed:tool_call>
minimax_m2 | BROKEN | <minimax:tool_call><invoke name="f"><parameter name="a"1</parameter><parameter name="b">2
    </parameter></invoke></minimax:tool_call>
minimax_m2 | the argument 'a' is not closed; end it with </parameter> | <minimax:tool_call><invoke name="f"><parameter
     name="a">1<parameter name="b">2</parameter></invoke></minimax:tool_call>
minimax_m2 | the argument 'a' is not closed | <minimax:tool_call><invoke name="f"><parameter name="a">see <invoke
     name="g"></invoke>
minimax_m2 | the argument 'a' is not closed | Now <invoke name="f"><parameter name="a">1
minimax_m2 | the argument 'a' is not closed | <minimax:tool_call><invoke name="f"><parameter name="a">1</invoke>
    </minimax:tool_call>
minimax_m2 | the function 'f' is not closed; end it with </invoke> | Now <invoke name="f">
minimax_m2 | the function 'f' is not closed; end it with </invoke> | Now <invoke name="f"> </inv
minimax_m2 | its tag <invoke name= is not closed | Now <invoke name="f
minimax_m2 | it holds no function | <minimax:tool_call></minimax:tool_call>
minimax_m2 | 'f' is not closed; end it with </invoke> | <minimax:tool_call><invoke name="f"></minimax:tool_call>
minimax_m2 | end it with </minimax:tool_call> | <minimax:tool_call><invoke name="f"></invoke>
glm4_moe | the argument 'a' is not closed | <tool_call>f<arg_key>a</arg_key><arg_value>see <tool_call>g</tool_call>
glm4_moe | the argument 'a' is not closed; end it with </arg_value> | <tool_call>f<arg_key>a</arg_key><arg_value>1
    </tool_call>
glm4_moe | BROKEN | <tool_call>f<arg_key>a</arg_key>1</arg_value></tool_call>
glm4_moe | name must come first | <tool_call></tool_call> ‖ <tool_call>get weather</tool_call>
glm4_moe | write each argument as | <tool_call>f<arg_key>a</arg_key></tool_call>
glm4_moe | write each argument as | <tool_call>f<arg_value>a</arg_value></tool_call>
glm4_moe | write each argument as | <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>
glm4_moe | not closed | <tool_call>f
llama3_json | invalid JSON | Sure! {"id": 1, "name": "f", "id": 2, "parameters": {"a"
llama3_json | invalid JSON | Sure! {"calls": {"name": "f", "parameters": {"a"
llama3_json | invalid JSON | Sure! {"name": "f", "parameters": {"a": }}
llama3_json | invalid JSON | Sure! {"type": "function", "name": "f", "parameters": {"a"
llama3_json | invalid JSON | {"name": "f", "parameters": {"a": }}
llama3_json | invalid JSON | {"name": "f", "parameters": {}}; {"name": "g", "param
llama3_json | must be a JSON object | Sure! {"name": "f", "parameters": 3}
llama3_json | "parameters" is missing | {"name": "f"}
llama3_json | "name" is missing | {"parameters": {}}
llama3_json | it must be a JSON object | <|python_tag|>print(1)
xlam | invalid JSON | [{"id": 1, "name": "f", "arguments": { ‖ [{"name": "f", "arguments": {}
xlam | "arguments" is missing | ```json⏎[{"name": "f"}]⏎```
granite | invalid JSON | [{"name": "f", "arguments": {} ‖ <|tool_call|>[{"name": "f", "arguments": {}}
granite | invalid JSON | <|tool_call|>{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}] ‖ <|tool_call|>f
granite | must be a JSON object | <tool_call>[{"name": "f", "arguments": 3}]
pythonic | not valid Python | [f(a="x]
pythonic | must be named: f(key=value) | [f(1)]
pythonic | must be named | [f(**x)]
pythonic | the key 'a' is given twice | [f(a=2, a=1)]
lfm2 | the key 'a' is given twice | <|tool_call_start|>[f(a=2, a=1)]<|tool_call_end|>
gemma | the key 'a' is given twice | ```tool_code⏎f(a=2, a=1)⏎```
pythonic | a value must be a literal | [f(a=g())] ‖ [f(a=__import__('os').system('true'))]
pythonic | it must be a call such as | [f(a=1), 2]
pythonic | out of range | [f(a=1e999)]
pythonic | the key 'b' is given twice | [f(a={"b": 1, "b": 2})]
gemma | the key 'a' is given twice | <|tool_call>call:f{a:1,a:2}<tool_call|>
llama4 | it must be a list of calls | <|python_start|>f(a=1)<|python_end|>
mistral | it must be a name and its JSON arguments | [TOOL_CALLS] ‖ [TOOL_CALLS]f{a: 1} ‖ [TOOL_CALLS]f["a"]
mistral | invalid JSON | [TOOL_CALLS][{"name": "f"
deepseek_v3 | it must begin with the function's name | <｜tool▁call▁begin｜>f<｜tool▁call▁end｜>
deepseek_v3 | invalid JSON | <｜tool▁call▁begin｜>function<｜tool▁sep｜>f⏎```json⏎{a}⏎```<｜tool▁call▁end｜>
deepseek_v3 | no name | <｜tool▁call▁begin｜>function<｜tool▁sep｜>⏎```json⏎{}⏎```<｜tool▁call▁end｜>
deepseek_v3 | no call follows <｜tool▁calls▁begin｜> | <｜tool▁calls▁begin｜>function<｜tool▁sep｜>f⏎```json⏎{}⏎```
deepseek_v31 | must be a JSON object | <｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>
deepseek_v31 | not closed; end it with <｜tool▁call▁end｜> | <｜tool▁call▁begin｜>f<｜tool▁sep｜>{}
deepseek_v31 | begin each with <｜tool▁call▁begin｜> | <｜tool▁calls▁begin｜>f<｜tool▁sep｜>{}<｜tool▁calls▁end｜>
kimi_k2 | must be named functions.name:0 | <|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>
kimi_k2 | it must begin with | <|tool_call_begin|>functions.f:0 {}<|tool_call_end|>
kimi_k2 | invalid JSON | <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>x<|tool_call_end|>
kimi_k2 | not closed | <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}
kimi_k2 | no call follows <|tool_calls_section_begin|> | <|tool_calls_section_begin|>functions.f:0 {}
kimi_k2 | no call follows <|tool_calls_section_begin|> | <|tool_calls_section_begin|>
gpt_oss | invalid JSON | <|channel|>commentary to=functions.f<|message|>x<|call|>
gpt_oss | must go to=functions.NAME | <|channel|>commentary to=browser.search<|message|>{}<|call|>
gpt_oss | no <|message|> | <|channel|>commentary to=functions.f ‖ <|call|>
gpt_oss | end it with <|call|> | <|channel|>commentary to=functions.f<|message|>{}<|start|>assistant
gpt_oss | end it with <|call|> | <|channel|>commentary to=functions.f <|constrain|>json<|message|>
gpt_oss | addressed to nobody | <|channel|>commentary<|message|>{"a": 1}<|call|>
gpt_oss | addressed to nobody | <|channel|>analysis<|message|>f<|call|>
phi4 | "arguments" is missing | functools[{"name": "f"}]
phi4 | invalid JSON | functools[f(1)]
internlm2 | invalid JSON | <|action_start|><|plugin|>f<|action_end|>
cohere | "parameters" is missing | <|START_ACTION|>[{"tool_name": "f"}]<|END_ACTION|>
cohere | not closed | <|START_ACTION|>[{"tool_name": "f", "parameters": {}}]
gemma | it must be call:name | <|tool_call>f{}<tool_call|>
gemma | a text is not closed | <|tool_call>call:f{a:<|"|>x}<tool_call|>
gemma | write the arguments as {key:value | <|tool_call>call:f{a}<tool_call|>
gemma | nothing may follow | <|tool_call>call:f{a:1}x<tool_call|>
gemma | end it with <tool_call|> | <|tool_call>call:f{a:1}
gemma | must be named | ```tool_code⏎f(1)⏎```
gemma | it must be a call such as | ```tool_code⏎import os⏎```
"""),
    ("pythonic", "[f(a=" + "[" * 300 + "]" * 300 + ")]", "not valid Python"),
    ("gpt_oss", " to=functions.f<|channel|>commentary json", "no <|message|>"),
    ("gpt_oss", " to=functions.f<|channel|>commentary json<|message|>x<|call|>", "invalid JSON"),
    ("gpt_oss", " to=functions.f<|call|>", "no <|message|>"),
    ("gpt_oss", " to=browser.open<|channel|>commentary<|message|>{}<|call|>", "must go to=functions.NAME"),
    ("gemma", "<|tool_call>call:f{a:" + "[" * 100 + "]" * 100 + "}<tool_call|>", "nested too deeply"),
]


@pytest.mark.parametrize(("name", "text", "reason"), MALFORMED)
def test_a_call_that_cannot_be_read_is_told_in_one_line(name, text, reason):
    parsed = parse(name, text)
    assert len(parsed.errors) == 1, parsed
    assert reason in parsed.errors[0]
    assert "\n" not in parsed.errors[0]
    assert len(parsed.errors[0]) < 300
    assert len(parsed.calls) <= 1


PLAIN = table(
    r"""
llama3_json | {"answer": 42}
llama3_json | {"tools": [{"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}]}
llama3_json | {"answer": {"name": "f", "parameters": {"q": "x"}}}
llama3_json | So {"tool_calls": [{"name": "f", "parameters": {}}]} it is, {"a": {"b": [{"name": "f", "arguments": {}}]}}.
llama3_json | The record {"name": "f", "age": 3} and {"type": "object", "parameters": 2} are no calls.
llama3_json | It is {"name": {"name": "f", "parameters": {}}} inside. ‖ Begin with {"name": and end with }.
minimax_m2 | Begin with <invoke name="f"> and end it, or <invoke name=⏎so.
xlam | [{"id": 1, "name": "Bob"}] ‖ ```json⏎[{"id": 1, "city": "Rome"}]⏎``` ‖ ```python⏎print([1])⏎```
xlam | ```json⏎{"answer": 1}⏎``` ‖ [1] says so
qwen3_coder | Write <function= and then⏎the name.
granite | [{"city": "Rome"}] ‖ Use [{"name": "f", "arguments": {}}] for that.
pythonic | [1, 2, 3] ‖ Use [f(a=1)] for that. ‖ [see f(x)]
phi4 | Use functools.partial or functools here.
internlm2 | <|action_start|><|interpreter|>print(1)
hermes | </tool_call> {}
mistral | [TOOL] calls
gpt_oss | to=functions.f {}
gemma | ```python⏎f(a=1)⏎```
glm4_moe | <arg_key>a</arg_key>
kimi_k2 | functions.f:0
deepseek_v31 | f<｜tool▁sep｜>{}
"""
)


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_what_only_looks_like_a_call_is_text(name, text):
    parsed = parse(name, text)
    assert (parsed.calls, parsed.errors, parsed.content) == ([], [], text)


SPELLINGS = [
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1<parameter=b>2</function>", [("f", {"a": "1", "b": "2"})]),
    ("qwen3_coder", "<tool_call><function=f></function><function=g></function></tool_call>", [("f", {}), ("g", {})]),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>\n</tool_call>", [("f", {"a": "1"})]),
    ("qwen3_coder", "<function=f><parameter=a>1</parameter><function=g>", [("f", {"a": "1"}), ("g", {})]),
    ("qwen3_coder", "<function=f><parameter=a>1</function><function=g></function>", [("f", {"a": "1"}), ("g", {})]),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</tool_call><tool_call><function=g><parameter=b>2</parameter></function>",
        [("f", {"a": "1"}), ("g", {"b": "2"})],
    ),
    ("deepseek_v32", '<｜DSML｜invoke name="f"></｜DSML｜invoke>', [("f", {})]),
    (
        "kimi_k3",
        '<|open|>response<|sep|><|close|>response<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a&quot;b" type="number"<|sep|>7<|close|>argument<|sep|><|close|>call<|sep|>',
        [("f", {'a"b': 7})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[a.f(x=[1, None], y=true)]<|tool_call_end|>",
        [("a.f", {"x": [1, None], "y": True})],
    ),
    ("olmo3", "<function_calls>\nf(a='x\\n)')\n  g()\n</function_calls>", [("f", {"a": "x\n)"}), ("g", {})]),
    (
        "gigachat3",
        '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {}}',
        [("f", {})],
    ),
    ("gigachat3", '<|function_call|>{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
    ("gpt_oss", "<|start|>assistant to=functions.a.b<|channel|>analysis json<|message|>{}<|call|>", [("a.b", {})]),
    ("minimax_m2", '<invoke name="f"><parameter name="a">1</parameter></invoke>', [("f", {"a": "1"})]),
    ("minimax_m2", "<invoke name=f></invoke>\n</minimax:tool_call>", [("f", {})]),
    ("minimax_m2", '<invoke name="f"></invoke><invoke name="g"></invoke>', [("f", {}), ("g", {})]),
    ("llama3_json", '{"id": "c1", "name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
    (
        "llama3_json",
        '{"parameters": {}, "id": 1, "name": "f"}; {"id": 2, "name": "g", "arguments": {}}',
        [("f", {}), ("g", {})],
    ),
    ("xlam", '[{"id": 1, "name": "f", "arguments": {}}]', [("f", {})]),
    ("xlam", '[{"id": "x", "type": "function", "arguments": {}, "name": "f"}]', [("f", {})]),
    ("xlam", '```json\n[{"id": 1, "name": "f", "arguments": {}}]\n```', [("f", {})]),
    ("granite", '[{"id": 1, "name": "f", "arguments": {}}]', [("f", {})]),
    ("qwen3_coder", "<function=f></function><tool_call><function=g></function></tool_call>", [("f", {}), ("g", {})]),
    ("seed_oss", "<function=f></function></seed:tool_call>", [("f", {})]),
    (
        "granite",
        ' [{"name": "f", "arguments": {"a": 1}}, {"arguments": {}, "name": "g"}]',
        [("f", {"a": 1}), ("g", {})],
    ),
    ("minimax_m2", "<minimax:tool_call><invoke name='f'></invoke></minimax:tool_call>", [("f", {})]),
    ("llama3_json", '{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', [("f", {})]),
    ("pythonic", "[f(a=true, b=null, c=-1.5, d=(1, 2))]", [("f", {"a": True, "b": None, "c": -1.5, "d": [1, 2]})]),
    ("pythonic", "[math.gcd(a=4, b=6)]", [("math.gcd", {"a": 4, "b": 6})]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "parameters": {}}]', [("f", {})]),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n``` <｜tool▁call▁end｜>", [("f", {})]),
    ("kimi_k2", "<|tool_call_begin|> f:12 <|tool_call_argument_begin|> {} <|tool_call_end|>", [("f", {})]),
    ("kimi_k2", "<|tool_call_begin|>functions.a.b:1<|tool_call_argument_begin|>{}<|tool_call_end|>", [("a.b", {})]),
    ("gpt_oss", "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>", [("f", {})]),
    ("gpt_oss", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", [("f", {})]),
    ("gpt_oss", "to=functions.f <|constrain|>json<|message|>{}<|call|>", [("f", {})]),
    ("gpt_oss", " to=functions.f<|message|>{}<|call|>", [("f", {})]),
    ("gpt_oss", "<|message|><|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{}", [("f", {})]),
    ("gpt_oss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>", [("f", {})]),
    ("internlm2", '<|action_start|><|plugin|>{"name": "f", "arguments": {}}', [("f", {})]),
    ("cohere", 'Action: ```json\n[{"tool_name": "f", "parameters": {}}]\n```', [("f", {})]),
    ("cohere", 'Action: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```', []),
    ("gemma", "<|tool_call>call:f{a:word,b:10:30,}<tool_call|>", [("f", {"a": "word", "b": "10:30"})]),
    ("gemma", "```tool_code\nprint(f(a=1))\ng(b='x')\n```", [("f", {"a": 1}), ("g", {"b": "x"})]),
    ("xlam", '<think>x</think>[{"name": "f", "arguments": {}}]', [("f", {})]),
    ("xlam", '[{"name": "f", "arguments": {}}]\n[{"name": "g", "arguments": {}}]', [("f", {}), ("g", {})]),
    ("pythonic", "[f(a=1)]\n[g()]", [("f", {"a": 1}), ("g", {})]),
    ("xlam", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', [("f", {})]),
    ("xlam", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', [("f", {})]),
]


@pytest.mark.parametrize(("name", "text", "calls"), SPELLINGS)
def test_spellings_that_upstreams_accept(name, text, calls):
    parsed = parse(name, text)
    assert (calls_of(parsed), parsed.errors, parsed.content.replace("<think>x</think>", "")) == (calls, [], "")


@pytest.mark.parametrize("text", ["what is </think>?", "what is <think>?", "the <|python_tag|>", "{", '{"name": "g'])
@pytest.mark.parametrize("beside", ["", 'and {"name": "g", "parameters": {}}'])
def test_tags_in_the_strings_of_a_call_among_words_are_text(text, beside):
    call = json.dumps({"name": "f", "parameters": {"query": text}})
    parsed = parse("llama3_json", f"Let me look. {call} {beside}")
    assert calls_of(parsed) == [("f", {"query": text}), *([("g", {})] if beside else [])]
    assert (parsed.errors, parsed.content) == ([], f"Let me look. {' and' if beside else ''}".strip())


@pytest.mark.parametrize(
    ("name", "text", "errors"),
    [
        ("llama3_json", 'maybe {"name": "f", "parameters": {"a": </think>{"name": "g", "parameters": {}}', 0),
        ("llama3_json", '{"answer": [{"name": "g", "parameters": {}}, oops', 0),
        ("minimax_m2", '<invoke name="f"><parameter name="a">1</invoke><invoke name="g"></invoke>', 1),
        ("glm4_moe", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call><tool_call>g</tool_call>", 1),
        ("pythonic", "[f()]</think>[g()]", 0),
        ("pythonic", "<think>a</think><think>b</think>[g()]", 0),
        ("granite", '[{"name": "f", "arguments": {}}] or not</think>[{"name": "g", "arguments": {}}]', 0),
    ],
)
def test_one_call_beside_what_is_none(name, text, errors):
    parsed = parse(name, text)
    assert (calls_of(parsed), len(parsed.errors)) == ([("g", {})], errors)


ELEMENTS = {
    "qwen3_coder": ("<tool_call>", "<function=none>", "</function>", "</tool_call>", "<parameter=query"),
    "seed_oss": ("<seed:tool_call>", "<function=none>", "</function>", "</seed:tool_call>", "<parameter=query"),
    "minimax_m2": (
        "<minimax:tool_call>",
        '<invoke name="none">',
        "</invoke>",
        "</minimax:tool_call>",
        '<parameter name="q',
    ),
    "glm4_moe": ("<tool_call>", "<tool_call>none", "</tool_call>", "<arg_key>k</arg_key>", "<arg_value>"),
}


@pytest.mark.parametrize("name", ELEMENTS)
@settings(max_examples=60)
@given(data=st.data())
def test_whatever_a_closed_argument_holds_is_its_text(name, data):
    marks = st.sampled_from([*ELEMENTS[name], "<think>", "</think>", "see ", "\n"])
    written = [f"x{''.join(data.draw(st.lists(marks, max_size=6)))}y" for _ in range(2)]
    assume(not any(re.search(r"</arg_key>\s*<arg_value>", text) for text in written))  # opens another argument
    calls = [("search", {"query": text, "topk": 3}) for text in written]
    tools = [
        {"name": "search", "parameters": {"properties": {"query": {"type": "string"}, "topk": {"type": "integer"}}}}
    ]
    for style in FORMATS.values():
        if style.name == name:
            parsed = parse(name, style.render(calls), tools)
            assert (calls_of(parsed), parsed.errors) == (calls, [])


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        ("qwen3_coder", "I look. <function=f></function> Done.", ["f"], "I look.  Done."),
        (
            "qwen3_coder",
            "<think><function=no></function></think><function=f>",
            ["f"],
            "<think><function=no></function></think>",
        ),
        ("llama3_json", 'Sure! {"name": "f", "parameters": {}} Done.', ["f"], "Sure!  Done."),
        ("llama3_json", 'A: {"name": "f", "parameters": {}}; {"arguments": {}, "name": "g"}', ["f", "g"], "A:"),
        ("llama3_json", '{"name": "f", "parameters": {}} and {"name": "g", "parameters": {}}', ["f", "g"], "and"),
        ("llama3_json", 'Of {"name": "x"} make {"name": "f", "parameters": {}}', ["f"], 'Of {"name": "x"} make'),
        ("llama3_json", 'Not {"name": x}, but {"name": "f", "parameters": {}}', ["f"], 'Not {"name": x}, but'),
        ("llama3_json", '```json\n{"name": "f", "parameters": {}}\n```', ["f"], "```json\n\n```"),
        (
            "llama3_json",
            'Hm {"name": "f", "parameters": {}}<|python_tag|>{"name": "g", "parameters": {}}',
            ["f", "g"],
            "Hm",
        ),
        (
            "llama3_json",
            '<think>{"name": "no", "parameters": {}}</think>Hm {"name": "f", "parameters": {}}',
            ["f"],
            '<think>{"name": "no", "parameters": {}}</think>Hm',
        ),
        ("granite", '[{"name": "f", "arguments": {}}] Done.', ["f"], "Done."),
        ("granite", '<think>hm</think>[{"name": "f", "arguments": {}}]', ["f"], "<think>hm</think>"),
    ],
)
def test_calls_without_tags_leave_the_words_around_them(name, text, calls, content):
    parsed = parse(name, text)
    assert ([call.name for call in parsed.calls], parsed.errors, parsed.content) == (calls, [], content)


@pytest.mark.parametrize(
    ("offered", "name"),
    [(["b"], "b"), (["a.b"], "a.b"), (["a.b", "b"], "a.b"), (["c"], "a.b"), ([], "a.b")],
)
def test_a_dotted_name_is_that_of_a_tool_on_offer(offered, name):
    tools = [{"type": "function", "function": {"name": each}} for each in offered]
    text = "<|tool_call_begin|>functions.a.b:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert [(call.name, call.id) for call in parse("kimi_k2", text, tools).calls] == [(name, "functions.a.b:0")]


def test_the_form_of_the_documents():
    text = (
        '<|tool▁calls▁begin|>\n<|tool▁call▁begin|>\nget_weather<|tool▁sep|>{"location": "北京"}\n<|tool▁call▁end|>\n'
        '<|tool▁call▁begin|>\nget_weather<|tool▁sep|>{"location": "上海"}\n<|tool▁call▁end|>\n<|tool▁calls▁end|>'
    )
    parsed = parse("deepseek_v31", text)
    assert calls_of(parsed) == [("get_weather", {"location": "北京"}), ("get_weather", {"location": "上海"})]
    assert (parsed.errors, parsed.content) == ([], "")


def test_harmony_shows_what_a_user_sees():
    parsed = parse(
        "gpt_oss",
        "<|channel|>analysis<|message|>to=functions.no {}<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        '<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{"a": "<|call|>"}<|call|>',
    )
    assert (parsed.content, calls_of(parsed), parsed.errors) == ("I look.", [("f", {"a": "<|call|>"})], [])
    parsed = parse(
        "gpt_oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    )
    assert (parsed.content, parsed.calls) == ("42", [])


def test_harmony_reads_a_turn_from_where_the_prompt_ends():
    parsed = parse("gpt_oss", 'I look. to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>')
    assert (parsed.content, calls_of(parsed), parsed.errors) == ("I look.", [("f", {"a": 1})], [])
    parsed = parse("gpt_oss", "<|message|>42<|return|>")
    assert (parsed.content, parsed.calls, parsed.errors) == ("42", [], [])
    parsed = parse(
        "gpt_oss", "mind the from=a to=b words<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    )
    assert (parsed.calls, parsed.errors) == ([], [])


def test_a_call_in_a_thought_before_an_answer_is_reasoning():
    mused = 'maybe <tool_call>{"name": "f", "arguments": {}}</tool_call></think>'
    assert parse("hermes", f"{mused} The answer is 7.").errors == []
    called = parse("hermes", f'{mused}<tool_call>{{"name": "g", "arguments": {{}}}}</tool_call>')
    assert (calls_of(called), called.errors) == ([("g", {})], [])


OWN_THOUGHTS = [
    ("seed_oss", "<seed:think>{}</seed:think>"),
    ("cohere", "<|START_THINKING|>{}<|END_THINKING|>"),
    ("mistral", "[THINK]{}[/THINK]"),
    ("gemma", "<|channel>thought{}<channel|>"),
    ("kimi_k2", "◁think▷{}◁/think▷"),
]


@pytest.mark.parametrize(("name", "thought"), OWN_THOUGHTS)
def test_thoughts_with_tags_of_their_own(name, thought):
    text = FORMATS[{"mistral": "mistral v3", "gemma": "gemma4"}.get(name, name)].render([("f", {})])
    mused = thought.format(f"maybe {text}")
    parsed = parse(name, mused + text)
    assert (calls_of(parsed), parsed.errors, parsed.content) == ([("f", {})], [], mused)
    for ended in (mused, thought.partition("{}")[0] + text, text + thought.partition("{}")[2]):
        told = parse(name, ended)
        assert (told.calls, len(told.errors), told.content) == ([], 1, ended)
        assert f"end the thought with {thought.partition('{}')[2]}" in told.errors[0]


TYPED = {
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "l": {"type": "array"},
        "m": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "e": {"enum": ["1", "2"]},
        "k": {"enum": [1, 2]},
        "u": {"type": ["integer", "string"]},
        "a": {"allOf": [{"type": "integer"}, {"minimum": 1}]},
        "c": {"type": "number", "allOf": [{"type": "integer"}]},
        "ao": {"allOf": [{"type": ["object", "null"]}, {"type": "object"}]},
        "x": {},
    }
}
VALUES = [
    *[
        ("s", "1", "1"),
        ("s", "null", "null"),
        ("i", "7", 7),
        ("i", "7.5", "7.5"),
        ("i", "x", "x"),
        ("i", "true", "true"),
    ],
    *[("n", "7", 7), ("n", "-1e3", -1000.0), ("n", "1e999", "1e999"), ("n", "NaN", "NaN"), ("b", "true", True)],
    *[
        ("b", "False", False),
        ("b", "1", "1"),
        ("o", '{"a": 1}', {"a": 1}),
        ("o", "[1]", "[1]"),
        ("l", "[1, null]", [1, None]),
    ],
    *[("i", "null", None), ("b", "NONE", None), ("o", "None", None), ("u", "null", "null"), ("b", "TRUE", True)],
    *[("o", "{'a': [1, None, (True, -2.5)]}", {"a": [1, None, [True, -2.5]]}), ("l", "['x', null]", ["x", None])],
    *[("o", "['x']", "['x']"), ("o", "dict(a=1)", "dict(a=1)"), ("o", "{'a'", "{'a'"), ("i", "0x10", "0x10")],
    *[("m", "x", "x"), ("l", "(" * 300 + ")" * 300, "(" * 300 + ")" * 300), ("l", "[" * 40, "[" * 40)],
    *[("m", "null", None), ("m", "None", None), ("m", "3", 3), ("e", "1", "1"), ("k", "1", 1), ("u", "3", 3)],
    *[
        ("a", "3", 3),
        ("a", "x", "x"),
        ("a", "null", None),
        ("c", "3", 3),
        ("ao", '{"a": 1}', {"a": 1}),
        ("ao", "x", "x"),
    ],
    *[("u", "three", "three"), ("x", "3", "3"), ("unknown", "3", "3")],
]


@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_the_schema_says_what_a_bare_text_means(key, text, value):
    tools = [{"type": "function", "function": {"name": "f", "parameters": TYPED}}]
    written = f"<tool_call><function=f><parameter={key}>\n{text}\n</parameter></function></tool_call>"
    [(_, arguments)] = calls_of(parse("qwen3_coder", written, tools))
    assert arguments == {key: value}
    assert type(arguments[key]) is type(value)


@pytest.mark.parametrize("form", [lambda tool: tool, lambda tool: tool.function, lambda tool: tool.to_openai()])
def test_schemas_may_be_objects(form):
    """verl's loops hand its parsers `tool.tool_schema`: the types of the arguments were lost."""
    schema = {"type": "function", "function": {"name": "f", "parameters": TYPED}}
    tool = form(OpenAIFunctionToolSchema.model_validate(schema))
    written = "<tool_call><function=f><parameter=i>\n3\n</parameter></function></tool_call>"
    assert calls_of(parse("qwen3_coder", written, [tool])) == calls_of(parse("qwen3_coder", written, [schema]))
    assert calls_of(parse("qwen3_coder", written, [tool])) == [("f", {"i": 3})]


NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
NULLS = [
    (NULLABLE, "None", None),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": "integer"}, "None", None),
    ({}, "None", None),
    ({"type": "string"}, "None", "None"),
    ({"type": "string"}, '<|"|>None<|"|>', "None"),
    (NULLABLE, '<|"|>None<|"|>', "None"),
    ({"type": "array", "items": {"type": "string"}}, "[None,null]", ["None", None]),
    ({"type": "array", "items": NULLABLE}, "[1,None]", [1, None]),
    ({"type": "object", "properties": {"a": {"type": "string"}}}, "{a:None,b:None}", {"a": "None", "b": None}),
]


@pytest.mark.parametrize(("schema", "written", "value"), NULLS)
def test_gemma_writes_null_as_none(schema, written, value):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"v": schema}}}}]
    text = f"<|tool_call>call:f{{v:{written}}}<tool_call|>"
    assert calls_of(parse("gemma", text, tools)) == [("f", {"v": value})]
    assert calls_of(parse("gemma", "<|tool_call>call:f{v:None}<tool_call|>")) == [("f", {"v": None})]


def test_glm_reads_json_where_no_schema_says_otherwise():
    pairs = "<arg_key>a</arg_key><arg_value>[1]</arg_value><arg_key>b</arg_key><arg_value>x y</arg_value>"
    written = f"<tool_call>f{pairs}</tool_call>"
    assert calls_of(parse("glm4_moe", written)) == [("f", {"a": [1], "b": "x y"})]
    tools = [{"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}]
    assert calls_of(parse("glm4_moe", written, tools)) == [("f", {"a": "[1]", "b": "x y"})]


HOSTILE = [
    " ",
    *texts(
        r"""
<tool_call> ‖ <think> ‖ </think> ‖ <tool_call>{ ‖ <tool_call>{"a":" ‖ <tool_call><function=f>
<function=f><parameter=a> ‖ <parameter=a>x</parameter> ‖ <tool_call>f<arg_key> ‖ <arg_key>a</arg_key> <arg_value>
<|python_tag|>{ ‖ [TOOL_CALLS] ‖ [TOOL_CALLS][ ‖ [TOOL_CALLS]f{ ‖ [TOOL_CALLS]f, ‖ <｜tool▁call▁begin｜>
<｜tool▁call▁begin｜>f<｜tool▁sep｜>{ ‖ <|start|> ‖ <|tool_call_begin|>f:0<|tool_call_argument_begin|>{
<|channel|>commentary to=functions.f<|message|> ‖ functools[ ‖ ⏎ ⏎ ‖ <|channel|> ‖ <|message|> ‖ <|tool_call|>[
<|action_start|><|plugin|>{ ‖ ```json⏎[{ ‖ <|START_ACTION|>[{ ‖ <|tool_call> ‖ <|tool_call>call:f{a:<|"|>
<|tool_call>call:f{a:[ ‖ call:f{a:b, ‖ ```tool_code⏎ ‖ <|python_start|>[f( ‖ <|python_start|>[f(' ‖ " ‖ \
<minimax:tool_call><invoke name="f"> ‖ <parameter name="a"> ‖ <seed:tool_call><function=f> ‖ <search> ‖ <answer>
[f(a= ‖ ( ‖ <escape> ‖ <information> ‖ to=functions.f␣ ‖ {"name": "f", "parameters": {}}; ‖ x {"name":␣
x {"name": "f", "parameters": { ‖ x {"name": 1, " ‖ {"name": "\" ‖ <function= ‖ <function=f> ‖ <invoke name=
<parameter= ‖ <parameter=a⏎ ‖ <function=f><parameter=⏎</function> ‖ <parameter=a>⏎</function>
<invoke name="f"><parameter name="a"> ‖ <invoke name="f"></invoke> ‖ <invoke name="f"><parameter␣
<arg_key>a</arg_key><arg_value></tool_call><tool_call>f ‖ <arg_key>a</arg_value> ‖ {"a": ‖ {"a": [{}, {"b": {}
{"a": {}} ‖ {"id": 1,␣ ‖ [{"id": 1, "name": "f",␣ ‖ <think></think> ‖ <think></think>[f( ‖ [f('</think>
"""
    ),
]


@pytest.mark.parametrize("name", sorted({style.name for style in FORMATS.values()} | {"search_r1"}))
def test_hostile_repetition_ends(name):
    parser = ToolParser.get_tool_parser(name)
    openings = {style.opening for style in FORMATS.values() if style.name == name} | {""}
    lengths = dict.fromkeys(HOSTILE, 15_000) | dict.fromkeys(openings - {""}, 100_000)
    for unit, length in lengths.items():
        for opening in openings:
            parsed = parser.parse(opening + unit * (length // len(unit)))
            assert all(len(error) < 300 for error in parsed.errors)


def test_every_format_of_the_list_is_there():
    assert {
        *(
            "hermes",
            "qwen",
            "qwen3_coder",
            "llama3_json",
            "llama4",
            "pythonic",
            "mistral",
            "deepseek_v3",
            "deepseek_v3.1",
        ),
        *("kimi_k2", "glm4_moe", "gpt_oss", "minimax_m2", "seed_oss", "phi4", "granite", "internlm2", "xlam", "cohere"),
        *("command", "gemma", "search_r1", "rl_factory", "auto"),
    } <= set(TOOL_PARSERS.names())


def test_a_recipient_on_offer_needs_no_prefix():
    tools = [{"type": "function", "function": {"name": "web.search"}}]
    text = "<|start|>assistant to=web.search<|channel|>commentary json<|message|>{}<|call|>"
    assert [call.name for call in parse("gpt_oss", text, tools).calls] == ["web.search"]
    assert parse("gpt_oss", text).errors


@pytest.mark.parametrize(("kind", "value"), [("object", {"b": [1]}), ("string", '"{\\"b\\": [1]}"')])
def test_json_that_is_written_as_a_text_in_json_is_read_where_no_text_is_wanted(kind, value):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": kind}}}}}]
    text = '<tool_call>f<arg_key>a</arg_key><arg_value>"{\\"b\\": [1]}"</arg_value></tool_call>'
    [call] = parse("glm4_moe", text, tools).calls
    assert json.loads(call.arguments) == {"a": value}
