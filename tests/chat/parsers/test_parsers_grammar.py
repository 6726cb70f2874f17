"""Grammars of calls: whatever one describes, its parser reads as valid calls of the tools."""

import json
import random

import jsonschema
import numpy as np
import pytest

from etude.chat import ToolParser
from etude.chat.grammar import turn_grammar
from etude.chat.parsers.base import TOOL_PARSERS
from etude.errors import GrammarError
from etude.inference import Grammar
from etude.inference.grammar import GrammarCompiler
from etude.models import build_tiny_tokenizer

SCHEMAS = {
    "add.up": {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 10**6}, "m": {"$ref": "#/$defs/m"}},
        "required": ["n", "m"],
        "additionalProperties": False,
        "$defs": {"m": {"enum": ["a", "</tool_call>", 'q"{\n', "é"]}},
    },
    "now": {"properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]
ABLE = {TOOL_PARSERS.get(name): name for name in TOOL_PARSERS.names() if TOOL_PARSERS.get(name).call_forms}
MOST = 250


def with_tokens(*tokens):
    tokenizer = build_tiny_tokenizer(["a b c"], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return tokenizer


def draw(tokenizer, grammar, seed):
    """A random text of the grammar; None if it gets too long."""
    compiler = GrammarCompiler(tokenizer, len(tokenizer))
    matcher, chance, ids = compiler.matcher(Grammar("lark", grammar)), random.Random(seed), []
    while len(ids) < MOST:
        mask = np.frombuffer(matcher.mask(ids, [compiler.eos]), dtype=np.uint8)
        allowed = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
        if compiler.eos in allowed and (allowed == [compiler.eos] or chance.random() < 0.5):
            return ids
        rest = [token for token in allowed if token != compiler.eos]
        control = [token for token in rest if token >= 300]  # they close what is open
        ids.append(chance.choice(control if control and chance.random() < 0.5 else rest))
    return None


def check_calls(calls):
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), {"type": "object", **SCHEMAS[call.name]})


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("parser", ABLE, ids=ABLE.values())
def test_calls_of_the_grammar_are_read(parser, tokens):
    """With the format's special tokens in the tokenizer and without."""
    tokenizer = with_tokens(*parser.special_tokens if tokens else ())
    made = ToolParser.get_tool_parser(ABLE[parser], tokenizer)
    counts = set()
    for several in (True, False):
        grammar = turn_grammar(made, tools=TOOLS, several=several)
        for seed in range(4):
            if (ids := draw(tokenizer, grammar, seed)) is None:
                continue
            parsed = made.parse(made.decode(ids), TOOLS)
            assert (parsed.errors, parsed.spoken) == ([], "")
            check_calls(parsed.calls)
            assert several or len(parsed.calls) == 1
            counts.add(len(parsed.calls))
    assert 1 in counts


@pytest.mark.parametrize(("prompt", "begin"), [("", ""), ("…<think>\n", "<think>"), ("…[THINK]", "[THINK]")])
@pytest.mark.parametrize("tags", [True, False])
def test_reasoning_may_come_first_and_ends_before_the_call(prompt, begin, tags):
    special = ("[TOOL_CALLS]", "[ARGS]", *(("<think>", "</think>", "[THINK]", "[/THINK]") if tags else ()))
    tokenizer = with_tokens(*special)
    parser = ToolParser.get_tool_parser("mistral", tokenizer)
    parser.special_tokens = special  # decoded
    grammar = turn_grammar(parser, tools=TOOLS[1:], prompt=prompt)
    texts = [parser.decode(ids) for seed in range(10) if (ids := draw(tokenizer, grammar, seed)) is not None]
    if tags or not prompt:
        assert texts
    for text in texts:
        parsed = parser.parse(begin + text, TOOLS)
        check_calls(parsed.calls)
        assert not parsed.errors


def test_json_may_stand_for_a_call():
    tokenizer = with_tokens()
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    grammar, kinds = turn_grammar(parser, tools=TOOLS[1:], schema={"const": 7}), set()
    for seed in range(12):
        parsed = parser.parse(parser.decode(draw(tokenizer, grammar, seed)), TOOLS)
        kinds.add(bool(parsed.calls))
        assert parsed.calls or json.loads(parsed.content) == 7
    assert kinds == {True, False}


@pytest.mark.parametrize("name", ["qwen3_coder", "gpt_oss", "search_r1", "pythonic"])
def test_a_format_without_a_grammar_is_named(name):
    parser = ToolParser.get_tool_parser(name, with_tokens())
    with pytest.raises(GrammarError, match=type(parser).__name__):
        turn_grammar(parser, tools=TOOLS)


def test_content_that_is_never_plain_cannot_be_json():
    with pytest.raises(GrammarError, match="GptOss"):
        turn_grammar(ToolParser.get_tool_parser("gpt_oss", with_tokens()), schema={"type": "object"})
