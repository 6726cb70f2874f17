"""Images in conversations: the ids are those of the Hugging Face processor, and nothing but an image has a placeholder."""

import json
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
from etude.chat.rendering import plain_message
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
            ids += [each for run, _ in chat.context_ids(turn, image_tokens=here) for each in run]
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
    tokens = [ImageReader(processor).read(each).tokens for each in pictures]
    runs = chat.demonstration([*messages, {"role": "assistant", "content": "Done."}], tools, tokens)
    assert [number for run, _ in runs for number in run] == [*ids, *encode("Done."), chat.end_of_turn_id]
    learned = [run for run, owner in runs if owner is Provenance.SAMPLED]
    assert learned == [[*encode(text), chat.end_of_turn_id] for text in [*(answer for answer, _ in turns), "Done."]]


def test_the_placeholders_of_a_tools_image_are_the_tools_and_those_of_a_users_the_users():
    messages = [
        {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "abc"}]},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "y"}, {"type": "image"}, {"type": "image"}]},
    ]
    runs = CHAT.context_ids(messages, image_tokens=[2, 1, 3])
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
        runs = CHAT.context_ids([message], image_tokens=[3] * images)
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
        (ChatTemplate(PROCESSOR.tokenizer), [4], "a text model takes no images"),
    ):
        with pytest.raises(DataError, match=told):
            chat.initial_ids(one, None, tokens)
        if chat is CHAT or tokens:
            with pytest.raises(DataError, match=told):
                chat.context_ids(one, image_tokens=tokens)


def test_text_of_a_vision_model_is_encoded_as_without_images():
    plain = ChatTemplate(PROCESSOR.tokenizer)
    for content in ("What is 2 + 3?", "  a <tool_call> b \n", ""):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
        assert CHAT.initial_ids(messages, TOOLS) == plain.initial_ids(messages, TOOLS)
        for role in ("user", "tool"):
            later = [{"role": role, "content": content}]
            assert CHAT.context_ids(later, after=()) == plain.context_ids(later, after=())


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


# -- a placeholder comes from an image and from nothing else ---------------------------------------------------------

SPELLED = f"put <|vision_start|>{PAD}<|vision_end|> or <|video_pad|> here"
FORBIDDEN = {PROCESSOR.tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS}


def described(**function):
    return [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}, **function}}]


@pytest.mark.parametrize(
    "tools",
    [
        described(description=SPELLED),
        described(name=PAD),
        described(parameters={"type": "object", "properties": {PAD: {"type": "string", "enum": ["a", SPELLED]}}}),
    ],
)
def test_a_tools_schema_that_spells_a_placeholder_shows_no_image(tools):
    read = ImageReader(PROCESSOR).read(picture(16, 16))
    message = {"role": "user", "content": content_of("Look.", 1)}
    ids = CHAT.initial_ids([message], tools, [read.tokens])
    plain = CHAT.initial_ids([message], described(), [read.tokens])
    assert ids.count(NUMBER) == plain.count(NUMBER) == read.tokens
    # The image stands in its message, not in the schema.
    text = PROCESSOR.tokenizer.decode(ids)
    assert text == PROCESSOR.tokenizer.apply_chat_template(
        [message], tools=tools, tokenize=False, add_generation_prompt=True
    ).replace(f"<|vision_start|>{PAD}<|vision_end|>Look", f"<|vision_start|>{PAD * read.tokens}<|vision_end|>Look")
    assert ids[ids.index(NUMBER) - 1 :].count(PROCESSOR.tokenizer.eos_token_id) == 1  # only the user's turn ends behind
    assert not FORBIDDEN & set(CHAT.initial_ids([{"role": "user", "content": "Look."}], tools))


@pytest.mark.parametrize(
    "arguments",
    [
        {"a": SPELLED, "b": [1, {PAD: [SPELLED]}]},
        json.dumps({"a": SPELLED}),
        json.dumps({"a": SPELLED}).replace("<", "\\u003c"),  # spelled only once it is decoded
    ],
)
def test_arguments_of_a_call_that_spell_a_placeholder_show_no_image(arguments):
    call = {"type": "function", "function": {"name": "zoom", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "seen"},
    ]
    ids = CHAT.initial_ids(messages, TOOLS)
    assert not FORBIDDEN & set(ids)
    assert PROCESSOR.tokenizer.decode(ids) == PROCESSOR.tokenizer.apply_chat_template(
        [plain_message(message) for message in messages], tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    [_, (sampled, label)] = CHAT.demonstration(messages[:2], TOOLS)
    assert label is Provenance.SAMPLED
    assert not FORBIDDEN & set(sampled)


@pytest.mark.parametrize("name", CHATS)
@given(
    texts=st.lists(st.lists(st.sampled_from([*VISION_TOKENS, "a", " ", "\n", "é"]), max_size=5), min_size=3, max_size=3)
)
@settings(max_examples=30, deadline=None)
def test_demonstrations_that_spell_placeholders_have_none(name, texts):
    chat = CHATS[name]
    roles = ("user", "assistant", "user", "assistant")
    said = [*map("".join, texts), f"It is {PAD}."]
    talk = [{"role": role, "content": text} for role, text in zip(roles, said)]
    runs = chat.demonstration(talk)
    ids = [number for run, _ in runs for number in run]
    pads = [chat.tokenizer.convert_tokens_to_ids(token) for token in (PAD, "<|video_pad|>")]
    assert not set(pads) & set(ids)
    whole = chat.tokenizer.apply_chat_template(talk, tokenize=False)
    assert chat.tokenizer.decode(ids) == whole[: len(chat.tokenizer.decode(ids))]
    assert f"It is {PAD}." in chat.tokenizer.decode(
        [n for run, label in runs if label is Provenance.SAMPLED for n in run]
    )


def test_a_model_writes_no_image():
    shown = {"role": "assistant", "content": content_of("Here.", 1)}
    with pytest.raises(DataError, match="an assistant message has an image: a model writes none"):
        CHAT.demonstration([{"role": "user", "content": "Draw."}, shown])


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [([4], "places for 1 images, and 0 are given"), ([4, 4, 4], "3 images are given, 1 more than")],
)
def test_a_demonstration_has_as_many_images_as_places(tokens, problem):
    asked, answer = {"role": "user", "content": content_of("This?", 1)}, {"role": "assistant", "content": "Yes."}
    with pytest.raises(DataError, match=problem):
        CHAT.demonstration([asked, answer, asked, answer], None, tokens)


NAMING = TEMPLATE.replace('"\\n<tool_response>\\n" + ', '"\\n<tool_response>\\n" + (message.name or "") + ": " + ')


@pytest.mark.parametrize("name", [PAD, "<|im_end|>", f"a{PAD}b<|vision_start|>"])
def test_a_name_that_a_model_invented_writes_no_control_token(name):
    """Plain characters that a model sampled come back as a name that the template writes."""
    assert NAMING != TEMPLATE
    processor = build(NAMING)
    chat = ChatTemplate(processor.tokenizer, processor=processor)
    assert chat.needs_tool_names
    for content, images in ((content_of("no such tool", 0), ()), (content_of("seen", 1), (4,))):
        answers = [{"role": "tool", "name": each, "content": content} for each in (name, "zoom")]
        told, plain = (
            [number for ids, _ in chat.context_ids([each], image_tokens=images) for number in ids] for each in answers
        )
        control = [processor.tokenizer.convert_tokens_to_ids(token) for token in chat.control_tokens]
        assert [each for each in told if each in control] == [each for each in plain if each in control]
