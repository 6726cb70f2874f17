"""Stop texts: a turn ends with the token that completes one, and its ids are as they were sampled."""

import asyncio

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from etude.errors import ConfigError, EngineError
from etude.inference import NativeEngine, NativeEngineOptions, SamplingParams
from etude.inference.served import Answer, validate_answer
from etude.inference.stop_strings import StopStrings
from etude.inference.vllm.server import sampling_fields
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer

TOKENIZER = build_tiny_tokenizer(["<search> red panda </search> and more words \u65e5\u672c"] * 20, 330)
MODEL = build_tiny_model(TinyModelSpec(vocab_size=330, max_position_embeddings=512, seed=3), TOKENIZER)


def text_of(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def drawn(seed, stop=(), *, deterministic=False, tokens=60):
    engine = NativeEngine(MODEL, NativeEngineOptions(tokenizer=TOKENIZER, deterministic=deterministic))
    params = SamplingParams(max_tokens=tokens, seed=seed, stop=stop)
    return asyncio.run(asyncio.wait_for(engine.generate("a", [5, 6, 7], params), 60))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_turn_ends_with_the_token_that_completes_a_text(seed, deterministic):
    whole = drawn(seed, deterministic=deterministic)
    written = text_of(whole.token_ids)
    place = 11 + 5 * seed
    stop = next(text for text in (written[i : i + 3] for i in range(place, place + 99)) if "\ufffd" not in text)
    count = next(n for n in range(1, len(whole.token_ids) + 1) if stop in text_of(whole.token_ids[:n]))
    cut = drawn(seed, ("never written", stop), deterministic=deterministic)
    assert (cut.token_ids, cut.stop_reason) == (whole.token_ids[:count], "stop")
    assert cut.log_probs == pytest.approx(whole.log_probs[:count], abs=1e-5)
    assert len(cut.weight_versions) == count
    assert drawn(seed, ("never written",)).stop_reason == "length"


@given(st.lists(st.integers(0, 329), min_size=1, max_size=120), st.integers(0, 100), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_the_window_overlooks_nothing(ids, start, length):
    """Looking at the last tokens finds what looking at all of them finds, at the same token."""
    written = text_of(ids)
    stop = written[start % len(written) :][:length] if written else "x"
    assume("\ufffd" not in stop)  # half a character, which no text that is asked for holds
    found = StopStrings(TOKENIZER, [stop])
    expected = next((n for n in range(1, len(ids) + 1) if stop in text_of(ids[:n])), None)
    assert next((n for n in range(1, len(ids) + 1) if found.complete(ids[:n])), None) == expected


def test_a_tokenizer_with_a_class_of_its_own_is_asked_itself():
    class Shouting(type(TOKENIZER)):
        def decode(self, *args, **kwargs):
            return super().decode(*args, **kwargs).upper()

    tokenizer = Shouting(tokenizer_object=TOKENIZER.backend_tokenizer)
    ids = TOKENIZER.encode("</search>", add_special_tokens=False)
    assert StopStrings(tokenizer, ["</SEARCH>"]).complete(ids)
    assert not StopStrings(tokenizer, ["</search>"]).complete(ids)


def test_parameters():
    assert SamplingParams.of({"stop": "</search>"}).stop == ("</search>",)
    assert SamplingParams.of({"stop": ["a", "b"]}).stop == ("a", "b")
    assert SamplingParams.of({"stop": None}).stop == ()
    assert SamplingParams(stop=("a",), seed=1).seeded(2) == SamplingParams(stop=("a",), seed=2)
    for wrong in (("",), (3,)):
        with pytest.raises(ConfigError, match="stop must be texts"):
            SamplingParams(stop=wrong)
    with pytest.raises(ConfigError, match=r"without NativeEngineOptions\.tokenizer"):
        asyncio.run(NativeEngine(MODEL).generate("a", [5], SamplingParams(stop=("a",))))


def test_served_engines_are_asked_to_keep_the_text():
    assert "stop" not in sampling_fields(SamplingParams())
    asked = sampling_fields(SamplingParams(stop=("</search>",)))
    assert (asked["stop"], asked["include_stop_str_in_output"], asked["detokenize"]) == (["</search>"], True, True)


def test_an_answer_may_end_at_a_text_only_where_one_was_asked_for():
    answer = Answer([4, 5], [-0.1, -0.2], "stop")
    assert validate_answer(answer, SamplingParams(stop=("x",)), 0, "here").stop_reason == "stop"
    with pytest.raises(EngineError, match="no stop id"):
        validate_answer(answer, SamplingParams(stop_token_ids=(9,)), 0, "here")
    long = Answer([4, 5], [-0.1, -0.2], "length")
    assert validate_answer(long, SamplingParams(stop=("x",)), 0, "here").stop_reason == "length"
