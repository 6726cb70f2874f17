"""Images in conversations: the ids are those of the Hugging Face processor, and nothing but an image has a placeholder."""

import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vision_stage import (
    TEMPLATE,
    VISION_TOKENS,
    build_image_processor,
    build_vision_model,
    build_vision_tokenizer,
    picture,
    save_vision_model,
)

from etude.chat import ChatTemplate
from etude.chat.check import check_template
from etude.chat.placeholders import content_of, image_count, text_of
from etude.cli.main import cli, run
from etude.errors import ConfigError, DataError
from etude.models import ImageReader
from etude.models.processor import make_processor
from etude.trajectory import Provenance

PAD = "<|image_pad|>"
NUMBERED = TEMPLATE.replace(
    '{%- if part.type == "image" or "image" in part %}',
    '{%- if part.type == "image" or "image" in part %}{%- set ns.n = ns.n + 1 %}{{- "Picture " ~ ns.n ~ ": " }}',
)
NUMBERED = "{%- set ns = namespace(n=0) %}" + NUMBERED
SINGLE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Qwen2.5-VL's own: every role is written alike, and no tool is ever described."""


def build(template=TEMPLATE):
    tokenizer = build_vision_tokenizer()
    config = build_vision_model("qwen2_5_vl", tokenizer).config
    tokenizer.chat_template = template
    return make_processor(config, tokenizer, build_image_processor())


PROCESSORS = {"grouped": build(), "single": build(SINGLE)}
CHATS = {name: ChatTemplate(each.tokenizer, processor=each) for name, each in PROCESSORS.items()}
PROCESSOR, CHAT = PROCESSORS["grouped"], CHATS["grouped"]
TOOLS = [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {}}}}]
NUMBER = PROCESSOR.image_token_id


def encode(text):
    return PROCESSOR.tokenizer.encode(text, add_special_tokens=False)


def by_processor(processor, messages, pictures, tools=None, generate=True):
    text = processor.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=generate
    )
    return processor(text=[text], images=pictures or None)["input_ids"][0]


def assembled(chat, reader, turns, pictures, tools=None):
    """Ids of a conversation as a rollout puts it together; `turns` are messages to the model, and texts that it wrote."""
    tokens = iter([reader.read(each).tokens for each in pictures])
    ids = []
    for turn in turns:
        if isinstance(turn, str):
            ids += [*encode(turn), chat.end_of_turn_id]
            continue
        here = [next(tokens) for message in turn for _ in range(image_count(message))]
        if not ids:
            ids = chat.initial_ids(turn, tools, here)
        else:
            ids += [each for run, _ in chat.context_ids(turn, after_stop=True, image_tokens=here) for each in run]
    return ids


texts = st.text("abc 5\n<é", max_size=12)
parts = st.one_of(st.just({"type": "image"}), st.builds(lambda text: {"type": "text", "text": text}, texts))
contents = st.lists(parts, max_size=4)
replies = st.tuples(st.sampled_from(["user", "tool"]), st.lists(contents, min_size=1, max_size=2))
answers = st.text("xyz. 7", min_size=1, max_size=8)


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(CHATS)),
    prompt=contents,
    turns=st.lists(st.tuples(answers, replies), max_size=3),
    sizes=st.lists(st.tuples(st.integers(6, 90), st.integers(6, 90)), min_size=16, max_size=16),
    with_tools=st.booleans(),
)
def test_a_conversation_has_the_processors_ids(name, prompt, turns, sizes, with_tools):
    chat, processor = CHATS[name], PROCESSORS[name]
    tools = TOOLS if with_tools else None
    pieces = [[{"role": "user", "content": prompt}]]
    for answer, (role, several) in turns:
        pieces += [answer, [{"role": role, "content": content} for content in several]]
    messages = [
        message
        for piece in pieces
        for message in ([{"role": "assistant", "content": piece}] if isinstance(piece, str) else piece)
    ]
    count = sum(map(image_count, messages))
    pictures = [picture(*size, seed=n) for n, size in enumerate(sizes * 2)][:count]
    ids = assembled(chat, ImageReader(processor), pieces, pictures, tools)
    assert ids == by_processor(processor, messages, pictures, tools)


def test_the_placeholders_of_a_tools_image_are_the_tools_and_those_of_a_users_the_users():
    messages = [
        {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "abc"}]},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "y"}, {"type": "image"}, {"type": "image"}]},
    ]
    runs = CHAT.context_ids(messages, after_stop=True, image_tokens=[2, 1, 3])
    placed = [(len(ids), provenance) for ids, provenance in runs if NUMBER in ids]
    assert placed == [(2, Provenance.TOOL), (1, Provenance.USER), (3, Provenance.USER)]
    assert all(ids for ids, _ in runs)


@settings(max_examples=60)
@given(
    pieces=st.lists(
        st.sampled_from([*VISION_TOKENS, "<|im_end|>", "a ", "<|image", "_pad|>", "\ufdd2", "<"]), max_size=6
    ),
    images=st.integers(0, 2),
    as_parts=st.booleans(),
    later=st.booleans(),
    role=st.sampled_from(["user", "tool"]),
)
def test_spelled_tokens_of_images_stay_text(pieces, images, as_parts, later, role):
    text = "".join(pieces)
    content = content_of(text, images) if images or not as_parts else [{"type": "text", "text": text}]
    message = {"role": role if later else "user", "content": content}
    if later:
        runs = CHAT.context_ids([message], after_stop=True, image_tokens=[3] * images)
        ids = [number for run, _ in runs for number in run]
    else:
        ids = CHAT.initial_ids([message], None, [3] * images)
    for token, expected in zip(VISION_TOKENS, [images, images, 3 * images, 0]):
        assert ids.count(PROCESSOR.tokenizer.convert_tokens_to_ids(token)) == expected
    shown = PROCESSOR.tokenizer.decode(ids, skip_special_tokens=False)
    for token in VISION_TOKENS:  # the text reads as it was written
        extra = {VISION_TOKENS[0]: images, VISION_TOKENS[1]: images, PAD: 3 * images}.get(token, 0)
        assert len(re.findall(re.escape(token), shown)) == text.count(token) + extra


def test_as_many_images_as_places():
    one = [{"role": "user", "content": [{"type": "image"}]}]
    for chat, tokens, told in (
        (CHAT, [], "places for 1 images, and 0 are given"),
        (CHAT, [4, 4], "places for 1 images, and 2 are given"),
        (ChatTemplate(PROCESSOR.tokenizer), [4], "a text model is shown no images"),
    ):
        with pytest.raises(DataError, match=told):
            chat.initial_ids(one, None, tokens)
        if chat is CHAT or tokens:
            with pytest.raises(DataError, match=told):
                chat.context_ids(one, after_stop=True, image_tokens=tokens)


def test_text_of_a_vision_model_is_encoded_as_without_images():
    plain = ChatTemplate(PROCESSOR.tokenizer)
    for content in ("What is 2 + 3?", "  a <tool_call> b \n", ""):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
        assert CHAT.initial_ids(messages, TOOLS) == plain.initial_ids(messages, TOOLS)
        for role in ("user", "tool"):
            later = [{"role": role, "content": content}]
            assert CHAT.context_ids(later, after_stop=False) == plain.context_ids(later, after_stop=False)


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (TEMPLATE, {"user", "tool"}),
        (SINGLE, {"user", "tool"}),
        (NUMBERED, set()),  # what follows a turn would depend on the images before it
        (TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", ""), set()),
        (TEMPLATE.replace("<|image_pad|>", "<|image_pad|><|image_pad|>"), set()),
        (TEMPLATE.replace('\\n" + shown(message.content) + "\\n', '\\n" + (message.content | string) + "\\n'), {"user"}),
        ("{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", set()),
    ],
    ids=["grouped", "single", "numbered", "none", "two", "users", "text"],
)  # fmt: skip
def test_which_messages_may_have_images(template, roles):
    processor = build(template)
    chat = ChatTemplate(processor.tokenizer, processor=processor)
    assert chat.image_roles == roles
    assert chat.initial_ids([{"role": "user", "content": "a"}])


def test_a_template_that_shows_no_images_refuses_them():
    processor = build(TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", ""))
    chat = ChatTemplate(processor.tokenizer, processor=processor)
    with pytest.raises(DataError, match="places for 0 images, and 1 are given"):
        chat.initial_ids([{"role": "user", "content": [{"type": "image"}]}], None, [4])
    assert NUMBER not in chat.initial_ids([{"role": "user", "content": PAD}])


def test_a_tokenizer_without_the_placeholder_is_refused():
    with pytest.raises(ConfigError, match="no special token '<image_soft_token>'"):
        ChatTemplate(PROCESSOR.tokenizer, processor=SimpleNamespace(image_token="<image_soft_token>"))


@pytest.mark.parametrize(
    ("template", "found"),
    [(TEMPLATE, "may be in messages of: user, tool"), (NUMBERED, "none between turns: the template writes no single")],
    ids=["grouped", "numbered"],
)
def test_the_check_says_where_images_may_be(template, found):
    processor = build(template)
    report = check_template(processor.tokenizer, processor=processor)
    assert [each.evidence.startswith(found) for each in report.findings if each.statement == "images"] == [True]
    assert all(each.statement != "images" for each in check_template(processor.tokenizer).findings)


def test_the_command_reads_a_vision_models_folder(tmp_path, capsys):
    assert run(cli, ["chat", "check", str(save_vision_model("qwen3_vl", tmp_path)), "--no-tokens"]) == 0
    assert "may be in messages of: user, tool" in capsys.readouterr().out


def test_the_words_of_a_content():
    assert text_of("abc") == "abc"
    assert text_of(None) == ""
    assert text_of(content_of("abc", 2)) == "[image][image]abc"
    assert content_of("", 1) == [{"type": "image"}]
