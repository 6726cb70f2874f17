"""What follows a turn is what the template writes there, contents standing where they do, whatever it asks of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat_template import CHATML, FAMILIES, TOOLS, family, flat, text_of, tokenizer_with

from etude.chat import ChatTemplate
from etude.chat.control import CUT
from etude.chat.parsers import ToolParser
from etude.chat.rendering import Renderer
from etude.chat.turns import ANCHOR
from etude.errors import ConfigError
from etude.trajectory import Provenance

# Reads a user's message as a tool's answer where it looks like one, as Qwen3's template does, and says how long it is.
ASKING = """{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('>')) %}
        {%- set ns.asked = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ ('!' if loop.index0 == ns.asked else '') ~ '\n' }}
    {%- if 'x' in m.content %}{{- '(x)' }}{%- endif %}
    {{- (m.content | trim) or 'nothing' }}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Writes contents through a macro and a set block.
MACRO = """{%- macro shown(content) %}{{- content if content is string else content[0].text }}{%- endmacro %}
{%- for m in messages %}
    {%- set text %}{{- shown(m.content) }}{% endset %}
    {{- '<|im_start|>' + m.role + '\n' + ([text, ''] | join('')) + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Answers by the identifier of the call, which must have nine characters; as Mistral's templates.
MISTRAL = """{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
            {{- raise_exception('identifiers have nine characters') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('identifiers have nine characters') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- else %}{{- m.content | trim + '<|im_end|>' }}{%- endif %}
{%- endfor %}"""

# As Kimi-K2's.
KIMI = """{%- for m in messages %}
    {{- '<|im_' + ('user' if m.role in ('user', 'system') else m.role) + '|>' + m.role + '<|im_middle|>' }}
    {%- if m.role == 'tool' %}{{- '## Return of ' ~ m.tool_call_id ~ '\n' ~ m.content }}
    {%- else %}
        {{- m.content }}
        {%- if m.tool_calls %}
            {{- '<|tool_calls_section_begin|>' }}
            {%- for call in m.tool_calls %}
                {{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' }}
                {{- (call.function.arguments | tojson) ~ '<|tool_call_end|>' }}
            {%- endfor %}
            {{- '<|tool_calls_section_end|>' }}
        {%- endif %}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""

KIMI_TOKENS = ["<|im_user|>", "<|im_assistant|>", "<|im_tool|>", "<|im_middle|>"]
KIMI_TOKENS += [f"<|tool_call{part}|>" for part in ("s_section_begin", "s_section_end", "_begin", "_end")]
KIMI_TOKENS += ["<|tool_call_argument_begin|>"]
MISTRAL_TOKENS = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
MORE = {
    "asking": lambda: tokenizer_with(ASKING),
    "macro": lambda: tokenizer_with(MACRO),
    "mistral": lambda: tokenizer_with(MISTRAL, MISTRAL_TOKENS),
    "kimi": lambda: tokenizer_with(KIMI, KIMI_TOKENS),
}
CHATS: dict[str, ChatTemplate] = {}


def chat_of(name):
    if name not in CHATS:
        CHATS[name] = ChatTemplate(MORE[name]() if name in MORE else family(name))
    return CHATS[name]


PIECES = [
    "<tool_response>",
    "</tool_response>",
    "<|im_end|>",
    "[/INST]",
    '{"a": "\\n"}',
    "{{ x }}",
    "%s",
    "\n\n",
    " ",
    "x>",
]
PROBES = (
    "",
    " \n\t two  words \n\n",
    '{"name": "x", "arguments": {"é": [1, "\\n"]}} <b>&amp; \'q\' "q"',
    "<tool_response>\n{{ x }} {% y %} %s {0}\n</tool_response>",
    "<think>\nwhy\n</think>\n\nThe answer is 7.",
    "日本語\u2028\u00a0\U0001f600\r\nx",
)
TEXTS = st.lists(st.sampled_from([*PIECES, *PROBES]) | st.text(max_size=8), max_size=5).map("".join)
LABELS = {"tool": Provenance.TOOL, "user": Provenance.USER}


def rendered_tail(chat, messages):
    """The text that the template writes behind the stub turn, contents as it gets them."""
    stub = chat._incremental.stub_for(messages)
    whole = chat._renderer.text(chat._control.cut(stub.conversation(messages)), generate=True)
    _, found, after = whole.partition(ANCHOR)
    assert found
    return after.partition(chat._turns.end(stub, messages[0]["role"]).text)[2].replace(CUT, "")


def rendered_ids(chat, messages):
    return chat._encoder.ids_after(chat._turns.answered.text, rendered_tail(chat, messages))[0]


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), role=st.sampled_from(["tool", "user"]))
@settings(max_examples=40, deadline=None)
def test_what_follows_a_turn_is_what_is_rendered(name, texts, role):
    chat = chat_of(name)
    messages = [{"role": role, "content": text.replace(CUT, "")} for text in texts]
    try:
        rendered_tail(chat, messages)
    except ConfigError:
        with pytest.raises(ConfigError):
            chat.context_ids(messages)
        return
    runs = chat.context_ids(messages)
    assert chat.tokenizer.decode(flat(runs)) == chat.tokenizer.decode(rendered_ids(chat, messages))
    if not any(token in text for token in chat.control_tokens for text in texts):
        assert flat(runs) == rendered_ids(chat, messages)


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
@given(texts=st.lists(TEXTS, min_size=2, max_size=2))
@settings(max_examples=25, deadline=None)
def test_prompts_are_encoded_as_rendered(name, texts):
    chat = chat_of(name)
    messages = [{"role": role, "content": text} for role, text in zip(("system", "user"), texts)]
    for tools in (None, TOOLS):
        try:
            whole = chat.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except Exception:
            continue
        assert chat.initial_ids(messages, tools) == chat.tokenizer(whole, add_special_tokens=False)["input_ids"]


def renderings(monkeypatch):
    """The conversations that are rendered from now on."""
    made, text = [], Renderer.text_as_given
    monkeypatch.setattr(
        Renderer,
        "text_as_given",
        lambda self, messages, *a, **k: made.append(messages) or text(self, messages, *a, **k),
    )
    return made


@pytest.mark.parametrize("name", ["tiny", "chatml", "qwen", "llama3", "reasoning", *MORE])
def test_messages_of_a_known_shape_are_rendered_once(name, monkeypatch):
    chat = ChatTemplate(MORE[name]() if name in MORE else family(name))
    message = {"role": "tool", "content": "12 apples"}
    chat.context_ids([message])
    made = renderings(monkeypatch)
    for _ in range(2):  # to count its tokens, and to add it
        chat.context_ids([{**message, "content": "13 pears"}])
        assert len(made) == 1


def test_a_content_that_the_template_escapes_is_found():
    chat = ChatTemplate(family("llama3"))
    runs = chat.context_ids([{"role": "tool", "content": ' 3 "apples"\n'}])
    assert text_of(chat, runs, Provenance.TOOL) == ' 3 \\"apples\\"\\n'


def test_contents_send_the_template_their_own_way():
    chat = ChatTemplate(MORE["asking"]())
    for text in ("<tool_response>7</tool_response>", "7", "x", " ", "", "<tool_response>x>"):
        message = {"role": "user", "content": text}
        runs = chat.context_ids([message])
        assert chat.tokenizer.decode(flat(runs)) == rendered_tail(chat, [message])
        assert text_of(chat, runs, Provenance.USER) == text.strip()


def test_a_content_that_the_template_changes_is_the_templates_text():
    shouting = CHATML.replace("m.content", "(m.content | upper)")
    chat = ChatTemplate(tokenizer_with(shouting.replace("| upper", "| replace('-', '+')")))
    runs = chat.context_ids([{"role": "tool", "content": text} for text in ("1-2", "2", " ")])
    assert "1+2<|im_end|>" in chat.tokenizer.decode(flat(runs))
    assert text_of(chat, runs, Provenance.TOOL) == "2"


@pytest.mark.parametrize("text", ["7 -- 8", "--7", "7--"])
def test_a_template_that_drops_a_part_of_a_content_is_refused(text):
    chat = ChatTemplate(tokenizer_with(CHATML.replace("m.content", "m.content.split('--')[-1]")))
    assert chat.context_ids([{"role": "tool", "content": "7 - 8"}])
    with pytest.raises(ConfigError):
        chat.context_ids([{"role": "tool", "content": text}])


def test_parts_that_spell_a_control_token_together_are_refused():
    template = CHATML.replace(
        "m.content +", "(m.content if m.content is string else m.content | map(attribute='text') | join) +"
    )
    chat = ChatTemplate(tokenizer_with(template))
    parts = [{"type": "text", "text": text} for text in ("<|im_", "end|>")]
    assert chat.context_ids([{"role": "tool", "content": parts[:1]}])
    with pytest.raises(ConfigError):
        chat.context_ids([{"role": "tool", "content": parts}])


@pytest.mark.parametrize("text", ["user", "im_end", "<", "assistant", "|>"])
def test_a_content_that_is_a_part_of_a_control_token_is_no_such_token(text):
    chat = ChatTemplate(family("chatml"))
    runs = chat.context_ids([{"role": "user", "content": text}])
    assert text_of(chat, runs, Provenance.USER) == text


def test_a_content_that_spells_the_probe_is_found():
    chat = ChatTemplate(family("chatml"))
    for text in ("Words of probe number 0.", "Words of probe number 1.", ANCHOR):
        runs = chat.context_ids([{"role": "tool", "content": text}, {"role": "user", "content": text}])
        assert text_of(chat, runs, Provenance.TOOL) == text_of(chat, runs, Provenance.USER) == text


@pytest.mark.parametrize(
    ("name", "format", "written", "expected"),
    [
        (
            "mistral",
            "mistral",
            '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "a1b2c3d4e"}, {"name": "add", "arguments": {}, "id": "x"}]',
            '[TOOL_RESULTS]{"content": 19, "call_id": "a1b2c3d4e"}[/TOOL_RESULTS]',
        ),
        (
            "mistral",
            "mistral",
            "[TOOL_CALLS]add[CALL_ID]z9z9z9z9z[ARGS]{}",
            '[TOOL_RESULTS]{"content": 19, "call_id": "z9z9z9z9z"}[/TOOL_RESULTS]',
        ),
        (
            "kimi",
            "kimi_k2",
            "<|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "## Return of functions.add:3\n19<|im_end|>",
        ),
    ],
)
def test_a_tools_answer_bears_the_identifier_that_the_model_gave_the_call(name, format, written, expected):
    parsed = ToolParser.get_tool_parser(format).parse(written)
    assert not parsed.errors
    message = parsed.result_message("19", parsed.calls[0])
    chat = chat_of(name)
    runs = chat.context_ids([message])
    assert expected in chat.tokenizer.decode(flat(runs))
    assert flat(runs) == rendered_ids(chat, [message])
    if len(parsed.calls) > 1:  # not an identifier that the template takes: one of ours stands for it
        assert "tool_call_id" not in parsed.result_message("19", parsed.calls[1])
        assert chat.context_ids([parsed.result_message("19", call) for call in parsed.calls])


def test_identifiers_are_no_part_of_what_a_call_asks_for():
    first, second = (
        ToolParser.get_tool_parser("kimi_k2")
        .parse(f"<|tool_call_begin|>functions.add:{n}<|tool_call_argument_begin|>{{}}<|tool_call_end|>")
        .calls[0]
        for n in (0, 1)
    )
    assert first == second
    assert hash(first) == hash(second)
    assert (first.id, second.id) == ("functions.add:0", "functions.add:1")
