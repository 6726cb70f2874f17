"""`tools_in_system`: a template that shows no tools, and the prompt that shows them all the same, token for token."""

import json

import pytest
from test_chat_template import CHATML, TOOLS, family, flat, text_of, tokenizer_with
from turn_templates import FAMILIES

from etude.chat import ChatTemplate, ToolParser
from etude.chat.check import require_answers
from etude.chat.template import unnamed
from etude.chat.tool_prompt import ToolPrompt
from etude.errors import ConfigError, DataError
from etude.trajectory import Provenance

SYSTEM_FIRST = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
NO_TOOL_ROLE = (
    "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tool role') }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)
QUESTION = {"role": "user", "content": "What is 1 + 1?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def chat_of(template, name="hermes"):
    tokenizer = tokenizer_with(template)
    return ChatTemplate(tokenizer, tools_in_system=ToolParser.get_tool_parser(name, tokenizer))


def test_the_system_message_shows_schemas_and_the_call_format():
    chat = chat_of(CHATML)
    shown = chat.decode(chat.initial_ids([QUESTION], TOOLS))
    assert json.dumps(TOOLS[0]) in shown
    [example] = ToolParser.get_tool_parser("hermes").parse(shown).calls
    assert example.name == "add"
    assert chat.initial_ids([QUESTION]) == ChatTemplate(tokenizer_with(CHATML)).initial_ids([QUESTION])


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_a_row_s_own_system_message_comes_first(content):
    shown = ToolPrompt(ToolParser.get_tool_parser("hermes")).rewrite(
        [{"role": "system", "content": content}, QUESTION], TOOLS
    )
    assert [message["role"] for message in shown] == ["system", "user"]
    said = shown[0]["content"]
    text = said if isinstance(said, str) else "".join(part["text"] for part in said)
    assert text.startswith("Be brief.\n\n# Tools")


def test_without_a_system_role_the_first_question_follows_the_tools():
    chat = chat_of(SYSTEM_FIRST)
    shown = chat.tokenizer.decode(chat.initial_ids([QUESTION], TOOLS))
    assert shown.startswith("<|im_start|>user\n# Tools")
    assert "What is 1 + 1?<|im_end|>" in shown


@pytest.mark.parametrize("template", [CHATML, NO_TOOL_ROLE], ids=["any role", "no tool role"])
def test_a_demonstration_is_what_a_rollout_would_have_assembled(template):
    chat = chat_of(template)
    require_answers(chat, "tool")
    results = [{"role": "tool", "content": text} for text in ("two <|im_end|>", "three")]
    turn, last = {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}, {"role": "assistant", "content": "2"}
    runs = chat.demonstration([QUESTION, turn, *results, last], TOOLS)
    sampled = chat.tokenizer.encode(f"I add.\n{WRITTEN}<|im_end|>", add_special_tokens=False)
    assert next(ids for ids, owner in runs if owner is Provenance.SAMPLED) == sampled
    rolled_out = [*chat.initial_ids([QUESTION], TOOLS), *sampled, *flat(chat.context_ids(results, after=sampled))]
    assert flat(runs)[: len(rolled_out)] == rolled_out
    assert text_of(chat, runs, Provenance.TOOL) == "two <|im_end|>three"
    assert flat(runs).count(chat.end_of_turn_id) == 5 + (template is CHATML)  # the tool's is plain characters


def test_without_a_tool_role_the_results_of_a_turn_are_one_user_message():
    chat = chat_of(NO_TOOL_ROLE)
    context = chat.context_ids([{"role": "tool", "content": text} for text in "ab"])
    shown = chat.tokenizer.decode(flat(context))
    inside = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in "ab")
    assert f"<|im_start|>user\n{inside}<|im_end|>" in shown
    assert chat.continued_whole([{"role": "tool", "content": text} for text in "ab"])[-len(flat(context)) :] == flat(
        context
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_takes_tools_in_plain_messages(name):
    template, tokens, eos = FAMILIES[name]
    tokenizer = tokenizer_with(template, tokens, eos)
    chat = ChatTemplate(tokenizer, tools_in_system=ToolParser.get_tool_parser("hermes", tokenizer))
    require_answers(chat, "tool")
    assert json.dumps(TOOLS[0]) in chat.tokenizer.decode(chat.initial_ids([QUESTION], TOOLS))


def test_tools_that_neither_template_nor_messages_show_are_refused():
    plain = ChatTemplate(tokenizer_with(CHATML))
    assert not plain.shows_tools
    with pytest.raises(DataError, match=r"add.*multi_turn\.tools_in_system=true"):
        plain.require_tools_shown([QUESTION], TOOLS)
    plain.require_tools_shown([{"role": "system", "content": "You may call add(a, b)."}, QUESTION], TOOLS)
    plain.require_tools_shown([QUESTION], None)
    for chat in (chat_of(CHATML), ChatTemplate(family("tiny"))):
        chat.require_tools_shown([QUESTION], TOOLS)


def test_parts_of_a_message_name_tools_too():
    parts = [{"type": "image"}, {"type": "text", "text": "Ask\nprice of it."}]
    assert unnamed(["price", "add"], [{"role": "user", "content": parts}]) == ["add"]


SHOWN_ABOVE = "{%- if tools and messages[0].role != 'system' %}{{- tools | tojson }}{%- endif %}" + CHATML


def test_a_template_that_drops_the_tools_below_a_system_message_is_refused_where_there_is_one():
    system = {"role": "system", "content": "Be brief."}
    dropping = ChatTemplate(tokenizer_with(SHOWN_ABOVE))
    dropping.require_tools_shown([QUESTION], TOOLS)
    with pytest.raises(DataError, match=r"add.*below a system message"):
        dropping.require_tools_shown([system, QUESTION], TOOLS)
    for chat in (chat_of(SHOWN_ABOVE), ChatTemplate(family("tiny"))):
        chat.require_tools_shown([system, QUESTION], TOOLS)
        assert "add" in chat.tokenizer.decode(chat.initial_ids([system, QUESTION], TOOLS))


def test_tools_are_described_where_messages_name_them_and_what_they_require():
    plain = ChatTemplate(tokenizer_with(CHATML))
    parameters = {"type": "object", "properties": {"first": {}, "then": {}}, "required": ["first"]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    assert not plain.describes_tools([{"role": "system", "content": "Call add."}, QUESTION], tools)
    assert not plain.describes_tools([{"role": "system", "content": "Say first."}, QUESTION], tools)
    assert plain.describes_tools([{"role": "system", "content": "Call add(first)."}, QUESTION], tools)
    assert plain.describes_tools([QUESTION], None)
    assert chat_of(CHATML).describes_tools([QUESTION], tools)


def test_a_parser_that_cannot_write_its_format_is_refused():
    class Own(ToolParser):
        def parse(self, text, tools=None):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"Own cannot write a call.*write\(self, calls, tools=None\)"):
        ToolPrompt(Own())


def test_a_parser_that_reads_another_call_than_it_writes_is_refused():
    class Own(type(ToolParser.get_tool_parser("hermes"))):
        def write(self, calls, tools=None):
            return "<tool_call>add(1)</tool_call>"

    with pytest.raises(ConfigError, match="does not read the call that it writes"):
        ToolPrompt(Own())
