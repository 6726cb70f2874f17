"""The quick ways of encoding and decoding give what the tokenizer's own calls give, and what is kept is what it was."""

from hypothesis import given
from hypothesis import strategies as st

from etude.chat import ChatTemplate
from etude.chat.encoding import Decoder, Encoder, plain_backend, structural_ids
from etude.chat.rendering import LRUCache, rendering_key
from etude.models import build_tiny_tokenizer

TOKENIZER = build_tiny_tokenizer(["one two three, four five six", "été à Genève"], 400)
TEXTS = st.lists(
    st.sampled_from(["one", " two", "é", "\n", "<|im_end|>", "<tool_call>", "  ", "7", "\U0001f600", "</s>"]),
    max_size=12,
).map("".join)


@given(TEXTS)
def test_ids_offsets_and_text_are_those_of_the_tokenizer(text):
    encoder = Encoder(TOKENIZER)
    whole = TOKENIZER(text, add_special_tokens=False, return_offsets_mapping=True)
    assert encoder.ids(text) == whole["input_ids"]
    first, length = TOKENIZER.eos_token, len(TOKENIZER.eos_token)
    after = TOKENIZER(first + text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = [(start - length, end - length) for start, end in after["offset_mapping"][1:]]
    assert encoder.ids_after(first, text) == (after["input_ids"][1:], offsets)
    visible = [number for number in whole["input_ids"] if number not in TOKENIZER.all_special_ids]
    assert Decoder(TOKENIZER, structural_ids(TOKENIZER)).decode(whole["input_ids"]) == TOKENIZER.decode(visible)


def test_padding_that_another_caller_switched_on_changes_nothing():
    tokenizer = build_tiny_tokenizer(["one two three"], 300)
    encoder, expected = Encoder(tokenizer), tokenizer("one two", add_special_tokens=False)["input_ids"]
    tokenizer(["one", "one two three"], padding="max_length", max_length=32, truncation=True)
    assert tokenizer.backend_tokenizer.padding is not None
    assert encoder.ids("one two") == expected
    assert encoder.ids_after(tokenizer.eos_token, "one two")[0] == expected


def test_a_tokenizer_with_ideas_of_its_own_is_asked_itself():
    class Shouting(type(TOKENIZER)):
        def _decode(self, token_ids, **kwargs):
            return super()._decode(token_ids, **kwargs).upper()

    tokenizer = build_tiny_tokenizer(["one two three"], 300)
    tokenizer.__class__ = Shouting
    assert plain_backend(tokenizer, "decode", "_decode") is None
    assert Decoder(tokenizer, structural_ids(tokenizer)).decode(tokenizer("one two")["input_ids"]) == "ONE TWO"
    assert plain_backend(TOKENIZER, "decode", "_decode") is TOKENIZER.backend_tokenizer


def test_the_cache_keeps_what_was_asked_for_last():
    cache = LRUCache(2)
    for key in "ab":
        cache.put(key, key)
    assert cache.get("a") == "a"
    cache.put("c", "c")
    assert [cache.get(key) for key in "abc"] == ["a", None, "c"]
    cache.put(None, "d")
    assert cache.get(None) is None
    assert len(cache) == 2


def test_messages_that_are_not_json_have_no_key():
    plain = {"role": "tool", "content": "7"}
    others = [{**plain, "name": "x"}, {**plain, "content": ["7"]}, {"role": "tool"}, {"content": "7", "role": "tool"}]
    assert len({rendering_key([each]) for each in [plain, *others]} | {rendering_key([plain], [])}) == 6
    assert rendering_key([plain, {**plain, "content": object()}]) is None


def test_what_is_kept_cannot_be_changed_by_who_got_it():
    chat = ChatTemplate(TOKENIZER)
    messages = [{"role": "tool", "content": "seven"}]
    first = chat.context_ids(messages)
    expected = [(list(ids), label) for ids, label in first]
    first[0][0].append(1)
    assert chat.context_ids(messages) == expected
