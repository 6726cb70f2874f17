"""Grammars in the native engine: what it samples is of the language, and its log-probs are of the masked distribution."""

import asyncio
import json
import pickle
import re
import time

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import ConfigError, GrammarError
from etude.inference import Grammar, NativeEngine, NativeEngineOptions, SamplingParams, VLLMServerEngine
from etude.inference.grammar import GrammarCompiler
from etude.inference.types import MOST_GRAMMAR
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer

TEXTS = ["What is 2 + 3? The answer is 5. tool call name arguments text value", '{"name": "echo", "arguments": {}}'] * 4
TOKENIZER = build_tiny_tokenizer(TEXTS, 400)
SPEC = TinyModelSpec(hidden_size=32, num_layers=2, intermediate_size=64, vocab_size=400, initializer_range=0.3)
MODEL = build_tiny_model(SPEC, TOKENIZER)
COMPILER = GrammarCompiler(TOKENIZER, 400)
EOS = TOKENIZER.eos_token_id
PROMPT = TOKENIZER.encode("What is 2 + 3?", add_special_tokens=False)
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["x", "ok"],
    "additionalProperties": False,
}


def json_schema(schema):
    return Grammar("json_schema", json.dumps(schema))


def engine(**options):
    return NativeEngine(MODEL, NativeEngineOptions(**{"tokenizer": TOKENIZER, **options}))


def generate(made, grammar, *, rows=1, **params):
    """The outputs of `rows` requests, each with its own seed."""

    async def main():
        asked = [
            SamplingParams(**{"max_tokens": 200, "seed": seed, "grammar": grammar, **params}) for seed in range(rows)
        ]
        return await asyncio.gather(*(made.generate(f"r{n}", PROMPT, each) for n, each in enumerate(asked)))

    return asyncio.run(asyncio.wait_for(main(), 60))


def text_of(output):
    assert output.token_ids[-1] == EOS
    return TOKENIZER.decode(output.token_ids[:-1], skip_special_tokens=False)


def allowed(kept):
    """The ids in an entry of `kept_ids`."""
    if isinstance(kept, bytes):
        return np.unpackbits(np.frombuffer(kept, dtype=np.uint8), bitorder="little").nonzero()[0].tolist()
    return kept.tolist()


STRINGS = st.sampled_from(
    [{"type": "string", "maxLength": 4}, {"type": "string", "pattern": "^[a-c]{1,3}$"}, {"enum": ["a", 'q"', "é\n"]}]
)
NUMBERS = st.sampled_from(
    [{"type": "integer", "minimum": -5, "maximum": 40}, {"type": "boolean"}, {"type": "null"}, {"const": 1.5}]
)


def objects(inner):
    names = st.sampled_from(["a", "b c", "ü"])
    return st.dictionaries(names, inner, max_size=3).flatmap(
        lambda properties: st.lists(st.sampled_from([*properties, "a"]), unique=True, max_size=3).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in required if name in properties],
                "additionalProperties": False,
            }
        )
    )


SCHEMAS = st.recursive(
    STRINGS | NUMBERS,
    lambda inner: (
        objects(inner)
        | inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2})
        | st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each})
    ),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(SCHEMAS, st.sampled_from([{}, {"temperature": 2.0}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0}]))
def test_what_is_sampled_validates(schema, options):
    """Unless it was cut off, and then it is the beginning of a text that does."""
    for output in generate(engine(), json_schema(schema), rows=3, **options):
        if output.stop_reason == "stop":
            jsonschema.validate(json.loads(text_of(output)), schema)
        else:
            matcher = COMPILER.matcher(json_schema(schema))
            assert matcher.mask(output.token_ids, [EOS])


def test_regular_expressions_and_lark_texts_are_kept_to():
    for output in generate(engine(), Grammar("regex", "(yes|no)( really){0,2}"), rows=8):
        assert re.fullmatch("(yes|no)( really){0,2}", text_of(output))
    made = Grammar("lark", 'start: "<" pair ">"\npair: /[0-9]/ ("," /[0-9]/)?')
    for output in generate(engine(), pickle.loads(pickle.dumps(made)), rows=8):
        assert re.fullmatch("<[0-9](,[0-9])?>", text_of(output))


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 3}, {"temperature": 1.4, "top_p": 0.9, "top_k": 6}],
)
def test_log_probs_are_of_the_masked_softmax(options):
    """Recomputed in float64 from the kept ids and, without top-k and top-p, from the grammar."""
    model, plain = (build_tiny_model(SPEC, TOKENIZER).double() for _ in range(2))
    plain.set_attn_implementation("eager")
    free = "top_p" not in options and "top_k" not in options
    for output in generate(
        NativeEngine(model, NativeEngineOptions(tokenizer=TOKENIZER)), json_schema(POINT), rows=6, **options
    ):
        ids = torch.tensor([PROMPT + output.token_ids])
        with torch.no_grad():
            logits = plain(input_ids=ids).logits[0, len(PROMPT) - 1 : -1] / options.get("temperature", 1.0)
        matcher = COMPILER.matcher(json_schema(POINT))
        for place, (token, log_prob, kept) in enumerate(zip(output.token_ids, output.log_probs, output.kept_ids)):
            chosen = allowed(kept)
            mask = allowed(matcher.mask(output.token_ids[:place], [EOS]))
            assert chosen == mask if free else set(chosen) <= set(mask)
            expected = logits[place, chosen].log_softmax(-1)[chosen.index(token)]
            assert log_prob == pytest.approx(float(expected), abs=2e-6)


def test_a_mask_depends_on_grammar_and_tokens_only():
    """A matcher that has read nothing gives the mask of one that read token by token: what preemption needs."""
    [output] = generate(engine(), json_schema(POINT))
    stepwise = COMPILER.matcher(json_schema(POINT))
    for count in range(len(output.token_ids)):
        before = stepwise.mask(output.token_ids[:count], [EOS])
        assert before == stepwise.mask(output.token_ids[:count], [EOS])
        assert before == COMPILER.matcher(json_schema(POINT)).mask(output.token_ids[:count], [EOS])
        assert output.token_ids[count] in allowed(before)


@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 2}, {"deterministic": True}, {"budget": 500}, {"max_num_batched_tokens": 4}],
)
def test_scheduling_changes_no_token(options):
    """Nor do rows without a grammar in the same step, nor preemption, nor prefix caches."""
    schema = json_schema({**POINT, "properties": {**POINT["properties"], "x": {"type": "string", "maxLength": 40}}})

    def outputs(budget=None, **given):
        made = engine(max_model_len=250, **given)
        if budget is not None:  # tokens; the key is in MiB
            made._budget = budget * made._shape.token_bytes
            made._scheduler = made._new_scheduler()

        async def main():
            params = [SamplingParams(max_tokens=120, seed=n, grammar=schema if n % 3 else None) for n in range(12)]
            made.open([f"r{n:02}" for n in range(12)])

            async def ask(name, each):
                output = await made.generate(name, PROMPT * 5, each)
                made.close(name)
                return output.token_ids, output.kept_ids

            return await asyncio.gather(*(ask(f"r{n:02}", each) for n, each in enumerate(params)))

        return asyncio.run(asyncio.wait_for(main(), 60)), made.metrics()

    expected, _ = outputs()
    found, metrics = outputs(**options)
    assert found == expected
    if "budget" in options:
        assert metrics["preemptions"] > 0


def test_control_tokens_are_in_no_text():
    """Not even where the schema allows any string; only where a grammar names one."""
    [output] = generate(engine(), json_schema({"type": "string", "minLength": 20}), temperature=3.0)
    control = set(TOKENIZER.all_special_ids) | set(TOKENIZER.added_tokens_decoder)
    for kept in output.kept_ids[1:-1]:
        assert not control & set(allowed(kept)) - {EOS}
    named = next(iter(control - {EOS}))
    [output] = generate(engine(), Grammar("lark", f'start: "a" <[{named}]> "b"'))
    assert named in output.token_ids


def test_only_a_complete_text_ends_and_with_the_requests_own_ids():
    stop = TOKENIZER.encode("\x07", add_special_tokens=False)[0]
    for output in generate(engine(), Grammar("regex", "[0-9]{2,4}"), rows=8, stop_token_ids=(stop,)):
        *digits, end = output.token_ids
        assert end == stop
        for place, kept in enumerate(output.kept_ids):
            complete = len(TOKENIZER.decode(output.token_ids[:place])) >= 2
            assert (stop in allowed(kept)) is complete
            assert EOS not in allowed(kept)
        assert 2 <= len(TOKENIZER.decode(digits)) <= 4


def doubling():
    """A schema whose text grows as 2^40 if references are written out."""
    levels = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    return {"$defs": levels | {"d40": {"type": "null"}}, "$ref": "#/$defs/d0"}


HOSTILE = {
    "itself": json_schema({"$ref": "#"}),
    "no schema": Grammar("json_schema", "[1]"),
    "no json": Grammar("json_schema", "{"),
    "nothing": json_schema(False),
    "unsatisfiable": json_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}),
    "unsupported": json_schema({"not": {"type": "string"}}),
    "remote": json_schema({"$ref": "http://127.0.0.1:9/x"}),
    "deep": Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "brackets": Grammar("regex", "(" * 5000 + "a" + ")" * 5000),
    "products": json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(3)]} for i in range(20)]}
    ),
    "many properties": json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}),
    "no lark": Grammar("lark", "start: ("),
    "no regex": Grammar("regex", "("),
}
COSTLY = {
    "doubling": json_schema(doubling()),
    "repetitions": Grammar("regex", "(a{1,500}|b{1,500}){1,500}c"),
    "catastrophic": json_schema({"type": "string", "pattern": "^((a+)+)+b$"}),
    "states": json_schema({"type": "string", "pattern": "^(.*a.{30}){5}$"}),
    "nested counts": json_schema({"type": "string", "pattern": "((a{1000}){1000}){1000}"}),
    "enum": json_schema({"enum": [f"v{i}" for i in range(8000)]}),
    "long": json_schema({"type": "string", "minLength": 10**6}),
}


@pytest.mark.parametrize("grammar", [*HOSTILE.values(), *COSTLY.values()], ids=[*HOSTILE, *COSTLY])
def test_hostile_grammars_fail_their_own_request_and_soon(grammar):
    """The request beside it is answered, and the event loop is never held."""
    made = engine()

    async def main():
        held, last, over = 0.0, time.perf_counter(), False

        async def watch():
            nonlocal held, last
            while not over:
                await asyncio.sleep(0.005)
                held, last = max(held, time.perf_counter() - last), time.perf_counter()

        watching = asyncio.ensure_future(watch())
        hostile = made.generate("h", PROMPT, SamplingParams(grammar=grammar, max_tokens=40))
        friendly = made.generate("f", PROMPT, SamplingParams(grammar=json_schema(POINT), max_tokens=80))
        found, answer = await asyncio.gather(hostile, friendly, return_exceptions=True)
        over = True
        await watching
        return found, answer, held

    found, answer, held = asyncio.run(asyncio.wait_for(main(), 30))
    json.loads(text_of(answer))
    assert held < 2.0
    if grammar in HOSTILE.values():
        assert isinstance(found, GrammarError)
        assert "\n" not in str(found)
        assert len(str(found)) < 500
    elif isinstance(found, Exception):
        raise found


def test_a_grammar_has_a_longest_text():
    with pytest.raises(GrammarError, match=str(MOST_GRAMMAR)):
        Grammar("regex", "a" * (MOST_GRAMMAR + 1))


def test_white_space_is_bounded():
    matcher = COMPILER.matcher(json_schema(POINT))
    space, count = TOKENIZER.encode(" ", add_special_tokens=False)[0], 0
    brace = TOKENIZER.encode("{", add_special_tokens=False)
    while space in allowed(matcher.mask([*brace, *[space] * count], [EOS])):
        count += 1
    assert count == 16


@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_request_may_end_while_its_grammar_is_compiled(monkeypatch, end):
    original, made = GrammarCompiler.matcher, engine()

    def slow(self, grammar):
        time.sleep(0.1)
        return original(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "matcher", slow)

    async def main():
        asked = asyncio.ensure_future(made.generate("a", PROMPT, SamplingParams(grammar=json_schema(POINT))))
        await asyncio.sleep(0.01)
        if end == "abort":
            await made.abort("a")
        else:
            made.close("a")
        return await asked

    output = asyncio.run(asyncio.wait_for(main(), 30))
    assert (output.token_ids, output.stop_reason) == ([], "aborted")


def test_who_cannot_keep_to_a_grammar_says_so():
    with pytest.raises(ConfigError, match="tokenizer"):
        generate(engine(tokenizer=None), json_schema(POINT))
    other = VLLMServerEngine.__new__(VLLMServerEngine)
    with pytest.raises(GrammarError, match="name=native"):
        asyncio.run(other.generate("a", PROMPT, SamplingParams(grammar=json_schema(POINT))))
