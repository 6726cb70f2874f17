"""Templates that write tools, or the parts of a turn, in ways of their own: a named template for tools, one that wants
tools at all times, turns of several parts, a generation prompt that nobody asked for, calls in no known format."""

import pytest
from test_chat_template import CHATML, TOOL_CALLS, TOOLS, flat, ids_of, tokenizer_with

from etude.chat import ChatTemplate, ToolParser
from etude.chat.check import check_template
from etude.chat.parsers.auto import unread_call
from etude.errors import ConfigError, DataError
from etude.trajectory import Provenance

# Goes through the tools without asking whether there are any, and writes their answers in a tag.
FOR_TOOLS = """{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- (tool.function | tojson) + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif m.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in m.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Puts the words of a turn in a pair of tokens, closes every message with another, and always ends with a generation
# prompt, into which it writes an empty thought; as Cohere's templates do.
TURNS = """{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|TURN|><|USER|>' + m.content + '<|END_TURN|>' }}
    {%- elif m.role == 'tool' %}
        {%- if not m.tool_call_id %}{{- raise_exception('whom does it answer?') }}{%- endif %}
        {{- '<|TURN|><|SYSTEM|>[{"result": ' + (m.content | tojson) + '}]<|END_TURN|>' }}
    {%- elif m.tool_calls %}
        {{- '<|TURN|><|BOT|><|START_ACTION|>[' }}
        {%- for call in m.tool_calls %}
            {{- '{"tool_call_id": "' + call.id + '", "tool_name": "' + call.function.name + '", "parameters": ' }}
            {{- (call.function.arguments | tojson) + '}' + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ']<|END_ACTION|><|END_TURN|>' }}
    {%- else %}{{- '<|TURN|><|BOT|><|START_RESPONSE|>' + m.content + '<|END_RESPONSE|><|END_TURN|>' }}{%- endif %}
{%- endfor %}
{{- '<|TURN|><|BOT|>' }}{%- if not thinking %}{{- '<|START_THINKING|><|END_THINKING|>' }}{%- endif %}"""
TURNS_TOKENS = [
    "TURN",
    "USER",
    "SYSTEM",
    "BOT",
    "END_TURN",
    "START_RESPONSE",
    "END_RESPONSE",
    "START_ACTION",
    "END_ACTION",
]
TURNS_TOKENS = [f"<|{name}|>" for name in [*TURNS_TOKENS, "START_THINKING", "END_THINKING"]]

# Closes every part of a turn with the same token, a thought that nobody had among them; as Kimi K3's template does.
PARTS = """{%- for m in messages %}
    {{- '<|open|>' + m.role + '<|sep|>' }}
    {%- if m.role == 'assistant' %}{{- '<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>' }}{%- endif %}
    {{- m.content }}
    {%- if m.role == 'assistant' %}{{- '<|close|>response<|sep|>' }}{%- endif %}
    {{- '<|close|>message<|sep|><|end_of_msg|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|open|>assistant<|sep|><|open|>think<|sep|>' }}{%- endif %}"""
PARTS_TOKENS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]

QUESTION, ANSWER = {"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "It is 3."}
ASKS = {"role": "assistant", "content": "", "tool_calls": [{"id": "c0", **TOOL_CALLS[0]}]}
TOLD = {"role": "tool", "content": '3 "apples" </tool_response>', "tool_call_id": "c0"}


def named():
    return tokenizer_with({"default": CHATML, "tool_use": FOR_TOOLS})


def whole(chat, messages, tools=TOOLS, **options):
    options = {"add_generation_prompt": True, **options}
    return ids_of(chat, chat.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))


def words(chat, runs):
    return chat.tokenizer.decode(flat(runs))


@pytest.mark.parametrize("tokenizer", [named, lambda: tokenizer_with(FOR_TOOLS)], ids=["named", "wants tools"])
def test_what_tools_answer_is_written_by_the_template_for_tools(tokenizer):
    chat = ChatTemplate(tokenizer())
    told = {**TOLD, "content": '3 "apples"'}
    sampled = ids_of(chat, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>')
    context = chat.context_ids([told], after=sampled)
    assert words(chat, context).startswith(
        '\n<|im_start|>tool\n<tool_response>\n3 "apples"\n</tool_response><|im_end|>'
    )
    assert chat.initial_ids([QUESTION], TOOLS) + sampled + flat(context) == whole(chat, [QUESTION, ASKS, told])
    asked = [{"role": "user", "content": "And 4?"}]
    after = chat.context_ids(asked, after=ids_of(chat, "It is 3.<|im_end|>"))
    talk = [QUESTION, ASKS, told, ANSWER, *asked]
    assert whole(chat, talk)[-len(flat(after)) :] == flat(after)


def test_a_stand_in_for_tools_is_in_no_ids():
    chat = ChatTemplate(named())
    runs = [chat.context_ids([message]) for message in (TOLD, QUESTION)]
    assert not any("stand_in" in words(chat, each) for each in runs)
    assert "stand_in" not in chat.decode(chat.initial_ids([QUESTION], TOOLS))
    assert chat.initial_ids([QUESTION]) == whole(chat, [QUESTION], None)  # without tools: the other template


def test_a_demonstration_of_calls_is_written_by_the_template_for_tools():
    chat = ChatTemplate(named())
    told = {**TOLD, "content": "3"}
    runs = chat.demonstration([QUESTION, ASKS, told, ANSWER], TOOLS)
    sampled = [chat.tokenizer.decode(ids) for ids, owner in runs if owner is Provenance.SAMPLED]
    assert '"name": "add"' in sampled[0]
    assert sampled[1] == "It is 3.<|im_end|>"


def test_a_template_that_wants_tools_is_found_safe_and_refuses_rows_without():
    tokenizer = tokenizer_with(FOR_TOOLS)
    report = check_template(tokenizer)
    assert report.safe
    shown = next(found for found in report.findings if "schemas" in found.statement)
    assert shown.evidence.startswith("always: without tools, the chat template refuses")
    with pytest.raises(DataError, match="the chat template refuses the messages"):
        ChatTemplate(tokenizer).initial_ids([QUESTION])


@pytest.mark.parametrize("thinking", [False, True])
def test_a_turn_of_several_parts_ends_with_the_end_of_sequence(thinking):
    chat = ChatTemplate(tokenizer_with(TURNS, TURNS_TOKENS, "<|END_TURN|>"), thinking=thinking)
    assert chat.tokenizer.convert_ids_to_tokens(list(chat.stop_token_ids)) == ["<|END_TURN|>"]
    assert check_template(chat.tokenizer, thinking=thinking).findings[0].holds
    calls = (
        '<|START_ACTION|>[{"tool_call_id": "c0", "tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|><|END_TURN|>'
    )
    context = flat(chat.context_ids([TOLD], after=ids_of(chat, calls)))
    ends = whole(chat, [QUESTION, ASKS, TOLD], thinking=thinking)
    assert ends[-len(context) :] == context
    assert chat.tokenizer.decode(context).startswith("<|TURN|><|SYSTEM|>[")
    for cut, closed in (("It is", "<|END_RESPONSE|><|END_TURN|>"), ("It is<|END_RESPONSE|>", "<|END_TURN|>")):
        following = words(chat, chat.context_ids([QUESTION], after=ids_of(chat, f"<|START_RESPONSE|>{cut}")))
        assert following.startswith(f"{closed}<|TURN|><|USER|>1 + 2?")


def test_a_token_inside_turns_does_not_end_them():
    """Whoever stopped at the first token behind the words would stop behind every thought."""
    chat = ChatTemplate(tokenizer_with(PARTS, PARTS_TOKENS, "<|im_end|>"))
    assert chat.tokenizer.convert_ids_to_tokens(chat.end_of_turn_id) == "<|end_of_msg|>"
    turn = (
        "hm<|close|>think<|sep|><|open|>response<|sep|>3<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    following = words(chat, chat.context_ids([QUESTION], after=ids_of(chat, turn)))
    assert following.startswith("<|open|>user<|sep|>1 + 2?<|close|>message<|sep|><|end_of_msg|><|open|>assistant")


# Puts an end of sequence behind the whole conversation, as Phi's templates do.
FINAL = CHATML.replace("{% endif %}", "{% else %}{{ '<|endoftext|>' }}{% endif %}")


def test_an_end_of_the_whole_conversation_ends_no_turn():
    chat = ChatTemplate(tokenizer_with(FINAL, ["<|endoftext|>"], "<|endoftext|>"))
    assert chat.tokenizer.convert_ids_to_tokens(list(chat.stop_token_ids)) == ["<|im_end|>", "<|endoftext|>"]
    assert words(chat, chat.context_ids([QUESTION], after=ids_of(chat, "3<|im_end|>"))).startswith("\n<|im_start|>user")
    assert words(chat, chat.context_ids([QUESTION], after=ids_of(chat, "3"))).startswith("<|im_end|>\n<|im_start|>user")
    runs = chat.demonstration([QUESTION, ANSWER, QUESTION, ANSWER])
    assert [words(chat, [run]) for run in runs if run[1] is Provenance.SAMPLED] == ["It is 3.<|im_end|>"] * 2


# Lists the tools again in front of the last question, as Mistral's templates do.
AGAIN = """{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == messages | map(attribute='role') | list | length - 1 %}
            {{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}{{- '[RESULT]' + m.content + '[/RESULT]' }}
    {%- elif m.tool_calls %}{{- '[CALLS]' + (m.tool_calls | tojson) + '<|im_end|>' }}
    {%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}"""
AGAIN_TOKENS = ["[INST]", "[/INST]", "[CALLS]", "[RESULT]", "[/RESULT]", "[TOOLS]", "[/TOOLS]"]


def test_what_stands_for_tools_is_never_shown():
    """A row's answer to its user is written by the default template, and one to tools never lists any."""
    default = AGAIN.replace("'[INST]' + m.content", "'[INST] ' + m.content")
    chat = ChatTemplate(tokenizer_with({"default": default, "tool_use": AGAIN}, AGAIN_TOKENS))
    assert words(chat, chat.context_ids([QUESTION])) == "[INST] 1 + 2?[/INST]"
    told = {"role": "tool", "content": "3"}
    assert words(chat, chat.context_ids([told])) == "[RESULT]3[/RESULT]"
    with pytest.raises(ConfigError, match="lists the tools again after a turn"):
        chat.context_ids([told, QUESTION])
    assert chat.initial_ids([QUESTION]) == whole(chat, [QUESTION], None)


def test_a_template_for_tools_that_cannot_be_continued_costs_the_tools_alone():
    tokenizer = tokenizer_with({"default": CHATML, "tool_use": "{{ raise_exception('documents are missing') }}"})
    chat = ChatTemplate(tokenizer)
    assert words(chat, chat.context_ids([QUESTION])).startswith("\n<|im_start|>user\n1 + 2?<|im_end|>")
    assert not chat.answers_tools


@pytest.mark.parametrize(
    "template", [CHATML.replace("assistant", "bot"), CHATML.split("{%- if add_generation")[0]], ids=["another", "none"]
)
def test_a_generation_prompt_that_begins_no_turn_is_refused(template):
    with pytest.raises(ConfigError, match="generation prompt is not how it begins an assistant turn"):
        ChatTemplate(tokenizer_with(template))


def test_a_template_that_takes_arguments_as_text_is_given_text():
    """DeepSeek's templates put the arguments of a call between two texts."""
    texts = FOR_TOOLS.replace("(call.function.arguments | tojson)", "call.function.arguments")
    chat, ours = (ChatTemplate(tokenizer_with(template)) for template in (texts, FOR_TOOLS))
    talk = [QUESTION, ASKS, {**TOLD, "content": "3"}, ANSWER]
    assert chat.demonstration(talk, TOOLS) == ours.demonstration(talk, TOOLS)
    assert ToolParser.get_tool_parser("auto", chat.tokenizer).name == "hermes"


# -- format: auto --------------------------------------------------------------------------------------------------

LISTED = FOR_TOOLS.replace('\'\\n<tool_call>\\n{"name": "\'', '\'\\n<tool_calls>[{"name": "\'').replace(
    "'}\\n</tool_call>'", "'}]</tool_calls> <tool_call>'"
)


def test_auto_tries_the_call_that_the_template_writes():
    parser = ToolParser.get_tool_parser("auto", tokenizer_with(FOR_TOOLS))
    assert parser.name == "hermes"
    only_without_content = FOR_TOOLS.replace("elif m.tool_calls", "elif m.tool_calls and m.content is none")
    assert ToolParser.get_tool_parser("auto", tokenizer_with(only_without_content)).name == "hermes"


def test_auto_refuses_a_parser_that_does_not_read_what_the_template_writes():
    with pytest.raises(ConfigError, match=r"looks like 'hermes', but writes a call .*not read \('<tool_calls>\[{"):
        ToolParser.get_tool_parser("auto", tokenizer_with(LISTED))
    finding = next(f for f in check_template(tokenizer_with(LISTED)).findings if "format=auto" in f.statement)
    assert finding.holds is None
    assert finding.evidence.startswith("the chat template looks like 'hermes', but")


@pytest.mark.parametrize(
    "template",
    [
        FOR_TOOLS.replace(" + '}\\n</tool_call>'", " + '}\\n</tool_call><tool_call>x</tool_call>'"),
        FOR_TOOLS.replace("(call.function.arguments | tojson) + '}", "call.function.arguments ~ '}"),
        CHATML.replace("m.content", "m.content + (tools | string if m.role == 'user' and tools else '')")
        + "{# <tool_call> #}",
    ],
    ids=["another call behind", "arguments as they are", "tools behind the question"],
)
def test_auto_is_not_misled(template):
    assert ToolParser.get_tool_parser("auto", tokenizer_with(template)).name == "hermes"


def test_a_parser_of_ones_own_that_cannot_be_tried_is_not_judged():
    class Odd(ToolParser):
        def parse(self, text):
            return text, None

    class ById(ToolParser):
        def parse(self, text, tools=None):
            raise NotImplementedError

        async def parse_ids(self, response_ids, tools=None):
            raise NotImplementedError

    tokenizer = tokenizer_with(FOR_TOOLS)
    assert unread_call(Odd(tokenizer), tokenizer) is None
    assert unread_call(ById(tokenizer), tokenizer) is None
    assert unread_call(ToolParser.get_tool_parser("hermes", tokenizer), tokenizer, chat_template=LISTED) is not None


def test_a_template_that_writes_no_calls_says_nothing_of_a_parser():
    parser = ToolParser.get_tool_parser("hermes", tokenizer_with(CHATML))
    assert unread_call(parser, parser.tokenizer) is None
    refusing = tokenizer_with("{{ raise_exception('no') }}")
    assert unread_call(ToolParser.get_tool_parser("hermes", refusing), refusing) is None
