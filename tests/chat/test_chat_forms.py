"""Forms: what is filled in is what the template would have rendered, and what cannot be foreseen is rendered."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat_template import CHATML, FAMILIES, TOOLS, family, tokenizer_with
from transformers.utils import chat_template_utils

from etude.chat import ChatTemplate, symbolic
from etude.chat.forms import PROBES, shape_of
from etude.chat.parsers import ToolParser
from etude.chat.rendering import Renderer
from etude.chat.symbolic import Slot, Untraceable
from etude.chat.tracer import Tracer
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
TEXTS = st.lists(st.sampled_from([*PIECES, *PROBES]) | st.text(max_size=8), max_size=5).map("".join)
LABELS = {"tool": Provenance.TOOL, "user": Provenance.USER}


def rendered_tail(chat, messages):
    """The text that the template writes behind the stub turn, contents as they are."""
    stub = chat._contexts.stub_for(messages)
    answers = stub.answers_to(messages)
    whole = chat._renderer.text([*stub.before(answers), *answers], generate=True)
    _, found, after = whole.partition(ANCHOR)
    assert found
    return after.partition(chat._turns.end(stub, messages[0]["role"]).text)[2]


def rendered_ids(chat, messages):
    return chat._turns.answered.encoder.ids(rendered_tail(chat, messages))


def ids_of(runs):
    return [number for ids, _ in runs for number in ids]


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), role=st.sampled_from(["tool", "user"]))
@settings(max_examples=40, deadline=None)
def test_what_is_filled_in_is_what_is_rendered(name, texts, role):
    chat = chat_of(name)
    messages = [{"role": role, "content": text.replace("\ufdd0", "").replace("\ufdd1", "")} for text in texts]
    try:
        rendered_tail(chat, messages)
    except ConfigError:
        with pytest.raises(ConfigError):
            chat.context_ids(messages)
        return
    runs = chat.context_ids(messages)
    assert chat.tokenizer.decode(ids_of(runs)) == chat.tokenizer.decode(rendered_ids(chat, messages))
    if not any(token in text for token in chat.control_tokens for text in texts):
        assert ids_of(runs) == rendered_ids(chat, messages)
    stub = chat._contexts.stub_for(messages)
    found = chat._contexts.continuations.find(stub.answers_to(messages), (stub.value,))
    if found is not None:
        made, contents = found
        assert made.runs(contents) == made.encoder.runs(*made._filled(made.parts, contents))


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
@given(texts=st.lists(TEXTS, min_size=2, max_size=2))
@settings(max_examples=25, deadline=None)
def test_prompts_that_are_filled_in_are_those_that_are_rendered(name, texts):
    chat = chat_of(name)
    messages = [{"role": role, "content": text} for role, text in zip(("system", "user"), texts)]
    for tools in (None, TOOLS):
        try:
            whole = chat.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except Exception:
            continue
        chat._prompts.forms.find(messages, (str(tools),), tools=tools)  # traced when it comes again
        form, contents = chat._prompts.forms.find(messages, (str(tools),), tools=tools) or (None, [])
        assert form is None or form.filled(contents) == whole
        assert chat.initial_ids(messages, tools) == chat.tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["tiny", "chatml", "qwen", "llama3", "reasoning", *MORE])
def test_families_are_not_rendered_twice(name, monkeypatch):
    """The second message of a shape costs no rendering: else nothing is gained."""
    chat = ChatTemplate(MORE[name]() if name in MORE else family(name))
    ids = "functions.add:0" if name == "kimi" else "abcdefgh0"
    for round in range(3):
        if round == 2:
            monkeypatch.setattr(Renderer, "text", None)
        message = {"role": "tool", "content": f"1{round} apples", "tool_call_id": f"{ids[:-1]}{round}"}
        assert chat.context_ids([message])
        assert chat.context_ids([{key: message[key] for key in ("role", "content")}])
        assert chat.initial_ids([{"role": "user", "content": f"1 + {round}?"}], TOOLS)


def test_a_prompts_shape_is_traced_when_it_comes_again(monkeypatch):
    """Where every row has tools of its own, a trace would cost several renderings and never be used."""
    chat = ChatTemplate(family("qwen"))
    traced = []
    trace = Tracer.trace
    monkeypatch.setattr(Tracer, "trace", lambda *given: traced.append(1) or trace(*given))

    def prompt(number, text):
        function = TOOLS[0]["function"] | {"name": f"tool{number}"}
        return chat.initial_ids([{"role": "user", "content": text}], [{"type": "function", "function": function}])

    for number in range(20):
        prompt(number, "What is 2 + 3?")
    assert not traced
    prompt(0, "What is 2 + 3?")  # the very same prompt is remembered as it is
    assert not traced
    ids = prompt(0, "What is 7 + 3?")
    assert traced
    monkeypatch.setattr(Renderer, "text", None)
    assert prompt(0, "What is 9 + 3?") != ids


def test_questions_send_contents_their_own_way():
    chat = ChatTemplate(MORE["asking"]())
    for text in ("<tool_response>7</tool_response>", "7", "x", " ", ""):
        message = {"role": "user", "content": text}
        written = chat.tokenizer.decode(ids_of(chat.context_ids([message])))
        assert written == rendered_tail(chat, [message])
    [known] = [
        known
        for key, known in chat._contexts.continuations._known._held.items()
        if key[1:] == ("role", "user", "content")
    ]
    assert len(known.forms) >= 4


def tracer(expression, content="A text"):
    template = "{% set c = messages[0].content %}" + expression
    made = Tracer(template, chat_template_utils._compile_jinja_template(template).environment)
    return made.trace([content], lambda ropes: {"messages": [{"role": "user", "content": ropes[0]}]})


@pytest.mark.parametrize(
    "expression",
    [
        "{{ c[0] }}",
        "{{ c[:3] }}",
        "{% for x in c %}{{ x }}{% endfor %}",
        "{{ c.split('x')[0] }}",
        "{{ '%s' % c }}",
        "{{ '%s' % (c,) }}",
        "{{ c % 3 }}",
        "{{ '{}'.format(c) }}",
        "{{ c.format(3) }}",
        "{{ c.format_map({}) }}",
        "{{ ' '.join([c]) }}",
        "{{ c.join(['a', 'b']) }}",
        "{{ c * 2 }}",
        "{{ 2 * c }}",
        "{{ c | title }}",
        "{{ [c] | tojson }}",
        "{{ c | tojson(indent=2) }}",
        "{{ {c: 1} }}",
        "{{ 1 if c < 'b' }}",
        "{{ 1 if c == messages[0].content }}",
        "{{ 1 if c in {'a': 1} }}",
        "{{ c | e }}",
        "{{ c | urlencode }}",
        "{{ c | int }}",
        "{{ c | list }}",
        "{{ c.encode() }}",
        "{{ ('a' + c).strip() }}",
        "{{ c.strip(c) }}",
        "{{ 'a'.replace('a', c) }}",
        "{{ [c, 'b'] | sort | first }}",
        "{{ strftime_now('%d') + c }}",
        "{{ [c, c] | unique | first }}",
        "{{ messages | map(attribute='content') | join('') | upper | e }}",
        "{{ c ~ 1 | string | wordcount }}{{ c | wordcount }}",
    ],
)
def test_what_takes_a_content_apart_is_not_foreseen(expression):
    with pytest.raises(Untraceable):
        tracer(expression)


@pytest.mark.parametrize(
    ("expression", "changes"),
    [
        ("{{ c }}", ()),
        ("{{ 'a' ~ c ~ 1 }}", ()),
        ("{{ c | string }}", ()),
        ("{{ [c, 'b'] | join(', ') }}", ()),
        ("{{ c or 'none' }}", ()),
        ("{{ c | default('none', true) }}", ()),
        ("{% set ns = namespace(x=c) %}{{ ns.x }}", ()),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(c) }}", ()),
        ("{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{{ c }}{% endcall %}", ()),
        ("{% filter trim %}{{ c }}{% endfilter %}", (("strip", (None,)),)),
        ("{% generation %}{{ c }}{% endgeneration %}", ()),
        ("{% if c is string and c is iterable and c is not mapping %}{{ c }}{% endif %}", ()),
        ("{% for m in messages if m.role == 'user' %}{{ m['content'] }}{% endfor %}", ()),
        ("{{ (messages | selectattr('role', 'equalto', 'user') | first).content }}", ()),
        ("{{ c.strip() }}", (("strip", ()),)),
        ("{{ c | trim | upper }}", (("strip", (None,)), ("upper", ()))),
        ("{{ c | replace('a', 'b') }}", (("replace", ("a", "b", -1)),)),
        ("{{ c | tojson }}", (("tojson", ()),)),
    ],
)
def test_where_a_content_stands_is_known(expression, changes):
    form = tracer(expression)
    assert [part for part in form.parts if isinstance(part, Slot)] == [Slot(0, changes)]
    template = "{% set c = messages[0].content %}" + expression
    plain = chat_template_utils._compile_jinja_template(template)
    for probe in PROBES:
        if form.holds([probe]):
            assert form.filled([probe]) == plain.render(messages=[{"role": "user", "content": probe}])


def test_a_form_that_is_wrong_is_not_kept(monkeypatch):
    """Whatever tracing overlooks, the comparison with the template finds."""
    chat = ChatTemplate(tokenizer_with(CHATML.replace("m.content +", "(m.content | replace('é', 'e')) +")))
    monkeypatch.setitem(symbolic._CHANGES, "replace", lambda text, *_: text)
    assert chat._contexts.continuations.find([{"role": "user", "content": "x"}], ("an answer",)) is None
    assert chat._prompts.forms.find([{"role": "user", "content": "x"}], ("",)) is None


def test_shapes_and_forms_are_bounded():
    chat = ChatTemplate(family("chatml"))
    for count in range(1, 80):
        chat.context_ids([{"role": "user", "content": "x"}] * count)
    assert len(chat._contexts.continuations._known) == 64
    asking = ChatTemplate(MORE["asking"]())
    for number in range(16):
        messages = [{"role": "user", "content": "xy"[number >> place & 1]} for place in range(4)]
        assert ids_of(asking.context_ids(messages)) == rendered_ids(asking, messages)
    [known] = asking._contexts.continuations._known._held.values()
    assert len(known.forms) == known.tried == 8


def test_messages_with_more_than_texts_have_no_shape():
    assert shape_of([{"role": "user", "content": "a", "name": "b"}]) == (
        ["role", "user", "content", "name"],
        ["a", "b"],
    )
    for message in (
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "user", "content": "a", "more": 1},
    ):
        assert shape_of([message]) is None


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
    assert expected in chat.tokenizer.decode(ids_of(runs))
    assert ids_of(runs) == rendered_ids(chat, [message])
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
