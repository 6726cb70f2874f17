"""`parallel_tool_calls=false`: where a turn of several calls is cut, in every format."""

import asyncio
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from agents_stage import call
from gateway_stage import USER, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agents.gateway.turn import PROBE, parse_turn
from etude.chat import HermesToolParser, ToolParser
from etude.inference import TokenOutput
from etude.trajectory import RoutedExperts

sys.path.insert(0, str(Path(__file__).parents[2] / "chat" / "parsers"))
from parsers_formats import FORMATS, schemas

WHOLE = {
    "minimax_m2", "pythonic", "llama4", "mistral v3", "phi4", "phi4 tag", "granite", "granite bare", "granite 3.1", "xlam",
    "xlam fence", "cohere", "deepseek_v32", "deepseek_v4", "kimi_k3", "lfm2", "olmo3",
}  # fmt: skip
"""Formats that write several calls as one list or block."""
TURNS = [
    [("f", {"a": "x y", "b": [1, None]}), ("g", {"c": 12}), ("h", {})],
    [("f", {}), ("g", {"c": "12"})],
    [("f", {"a": "x. .y"}), ("f", {"a": "x"})],
]


class Characters:
    """A parser's tokens are single characters here, so that every place of a text is one where it may be cut."""

    def __init__(self, parser):
        self.read = 0
        self._parse, parser.parse, parser.decode = parser.parse, self.parse, lambda ids: "".join(map(chr, ids))

    def parse(self, text, tools=None):
        self.read += 1
        return self._parse(text, tools)


def output_of(text):
    ids = list(map(ord, text))
    return TokenOutput(ids, [-0.1] * len(ids), "stop", [0] * len(ids))


def cut(parser, text, tools):
    request = request_of({"messages": [USER], "tools": tools, "parallel_tool_calls": False})
    return asyncio.run(parse_turn(parser, output_of(text), request))


@pytest.mark.parametrize("calls", TURNS)
@pytest.mark.parametrize("label", FORMATS)
def test_a_turn_ends_with_its_first_call(label, calls):
    """And the place is the only one from which on the call is settled: a search by halves finds it, whatever follows."""
    style = FORMATS[label]
    parser = ToolParser.get_tool_parser(style.name)
    text, tools = style.render(calls), schemas(calls)
    first = parser.parse(text, tools).calls[:1]
    settled = [parser.parse(text[:n] + PROBE, tools).calls[:1] == first for n in range(1, len(text) + 1)]
    assert sum(before != after for before, after in pairwise(settled)) <= 1
    Characters(parser)
    turn = cut(parser, text, tools)
    kept = len(turn.output.token_ids)
    if label in WHOLE:
        assert (len(turn.calls), kept) == (len(calls), len(text))
    else:
        assert (turn.calls, kept, turn.errors) == (first, 1 + settled.index(True), [])


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["f", "g", "h"]), min_size=2, max_size=4), st.text("ab<>{}/\n", max_size=12))
def test_what_follows_the_first_call_does_not_move_the_cut(names, words):
    parser = HermesToolParser()
    Characters(parser)
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    text = call(names[0], a=1) + words + "".join(call(name, b=2) for name in names[1:])
    turn = cut(parser, text, tools)
    if len(parser.parse(text, tools).calls) > 1:
        assert "".join(map(chr, turn.output.token_ids)) == call(names[0], a=1)


def test_a_long_turn_is_read_a_few_times_only():
    parser = HermesToolParser()
    counted = Characters(parser)
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = "<think>" + "why? " * 20_000 + "</think>" + call("f", a=1) + call("f", a=2)
    turn = cut(parser, text, tools)
    assert len(turn.calls) == 1
    assert counted.read <= 3 + len(text).bit_length()


def test_what_stays_of_a_turn_keeps_its_experts():
    """Those of the context but for its last token, as the engine gives them."""
    parser = HermesToolParser(None)
    Characters(parser)
    output = output_of("yes STOP no")
    experts = RoutedExperts.of(np.arange(3 + 10).reshape(-1, 1, 1))  # of a prompt of 3 tokens, too
    request = request_of({"messages": [USER], "stop": ["STOP"]})
    turn = asyncio.run(parse_turn(parser, replace(output, routed_experts=experts), request))
    assert len(turn.output.token_ids) == 8
    assert turn.output.routed_experts == experts.first(3 + 7)
