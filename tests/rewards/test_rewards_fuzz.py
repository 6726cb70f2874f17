"""Whatever a model writes, every scorer answers: no crash, no hang, and nothing earned by garbage."""

import json
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.errors import EtudeError
from etude.rewards import answers, bfcl, code, compute_score, repetition, search_r1, tags
from etude.rewards.default import ANSWERS
from etude.rewards.numeral import read_numeral

CALLS = json.dumps([{"area.triangle": {"base": [10], "height": [5]}}])
TRUTHS = {
    "openai/gsm8k": "72431",
    "etude/arithmetic": "72431",
    "HuggingFaceH4/MATH-500": r"\frac{72431}{17}",
    "math_dapo": "72431",
    "numina_olympiads": r"72431\sqrt{3}",
    "hiyouga/geometry3k": "72431",
    "etude/pictures": "a very long option that nobody guesses",
    "searchR1_nq": {"target": ["Vasilisa Zheleznyak"]},
    "bfcl_simple": CALLS,
}
FORMS = {"hiyouga/geometry3k": 0.1}  # what the form alone may earn
PIECES = [
    r"\boxed{", "}", "{", r"\frac", "####", "Answer:", "<answer>", "</answer>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", '{"name": "area.triangle", "arguments": ', "[area.triangle(", "base=", ")", "]", "1", "-", ".", ",", "$",
    "\\", "\x00", "\ud800", "\u202e", "é", "√", "∞", "answer is ", " or ", "10^{10^{10}}", "(a+)+$", "\n", "%", "°",
    "```python\n", "NaN", "Infinity", "1e999", "0x41", "<|im_end|>",
]  # fmt: skip
soups = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)


@pytest.fixture(autouse=True)
def short_algebra(monkeypatch):
    monkeypatch.setattr(answers._algebra, "seconds", 0.2)


def earned(source, text):
    found = compute_score(source, text, TRUTHS[source])
    value = found["score"] if isinstance(found, dict) else found
    assert math.isfinite(value)
    return value


@pytest.mark.parametrize("source", TRUTHS)
@given(text=st.one_of(soups, st.text(max_size=400), st.binary(max_size=400).map(lambda data: data.decode("latin-1"))))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_garbage_earns_nothing(source, text):
    assert earned(source, text) <= FORMS.get(source, 0.0)


def megabytes():
    dice = random.Random(0)
    yield "random bytes", dice.randbytes(1_000_000).decode("latin-1")
    for unit in PIECES:
        yield repr(unit), unit * (1_000_000 // len(unit))
    for opening, closing in (("{", "}"), ("[", "]"), ("(", ")"), (r"\boxed{", "}"), (r"\frac{", "}"), ('{"a":', "}")):
        yield f"nested {opening}", opening * 100_000 + closing * 100_000
    for head in ("answer", "answer is", "Answer:", "####", "<answer>", r"\boxed{", "score", "1"):
        yield f"{head} and blanks", head + " " * 19_000 + "x"
    yield "nested call", "[f(a=" + "[" * 50_000 + "]" * 50_000 + ")]"
    yield "unary", "[f(a=" + "-" * 90_000 + "1)]"
    yield "attributes", "[f" + ".a" * 40_000 + "(b=1)]"
    yield "digits", "#### " + "9" * 1_000_000
    yield "boxed digits", r"\boxed{" + "9" * 1_000_000 + "}"


@pytest.mark.parametrize(("name", "text"), megabytes(), ids=[name for name, _ in megabytes()])
def test_a_megabyte_of_anything_is_scored(name, text):
    for source in TRUTHS:
        assert earned(source, text) <= FORMS.get(source, 0.0)
    for reads in ANSWERS.values():
        reads(text)
    assert tags.compute_score(text) == 0.0
    assert 0.0 <= tags.count_tags(text) < 1.0
    assert -1.0 <= repetition.compute_score(text) <= 0.0
    assert search_r1.compute_score(text, "Vasilisa Zheleznyak")["score"] <= 0.1
    code.extract_code(text)


@given(
    text=soups,
    truth=st.one_of(soups, st.lists(soups, max_size=3), st.none(), st.integers(), st.dictionaries(soups, soups)),
)
@settings(max_examples=200, deadline=None)
def test_any_ground_truth_of_calls_is_read_or_refused(text, truth):
    try:
        found = bfcl.compute_score(text, truth)
    except EtudeError:
        return
    assert found["score"] in (0.0, 1.0)


@given(text=soups)
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_number_or_none(text):
    read_numeral(text)
    assert search_r1.has_form(text) in (True, False)
