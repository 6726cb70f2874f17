"""Scorers: GSM8K numbers, boxed mathematics, the choice by data source, users' functions."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, InfrastructureError
from etude.rewards import bfcl, compute_score, gsm8k, load_compute_score, search_r1
from etude.rewards import math as mathematics
from etude.rewards.finite import as_reward


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so it is 3.\n#### 72", "72", "72"),
        ("#### 1,234.50 dollars", "1234.50", "1234.50"),
        ("#### $18.", "18", "18"),
        ("#### -5", "-5", "-5"),
        ("#### 1\n#### 2", "2", "2"),
        ("the answer is 7.", None, "7"),
        ("none", None, None),
        ("#### ...", None, None),
        ("#### 5" + " " * 400, None, "5"),
        ("it is .5", None, ".5"),
        ("#### 5*4", None, "4"),
        ("#### 10-7", None, "-7"),
        ("#### −42", "-42", "-42"),
        ("#### 3 or 4", None, "4"),
        ("#### 5e3", None, "3"),
        ("#### 42 to go", "42", "42"),
        ("#### 42\n#### 5 or 7", None, "7"),
        ("#### 42\n#### 6*7", None, "7"),
        ("#### 42\n#### Checked", "42", "42"),
        ("##### 42", "42", "42"),
    ],
)
def test_gsm8k_answers(text, strict, flexible):
    assert gsm8k.extract_answer(text) == strict
    assert gsm8k.extract_answer(text, "flexible") == flexible


def test_gsm8k_scores():
    assert gsm8k.compute_score("#### 1000", "1,000") == 1.0
    assert gsm8k.compute_score("#### 72.0", "steps\n#### 72") == 1.0
    assert gsm8k.compute_score("#### 71", "72", format_score=0.1) == 0.1
    assert gsm8k.compute_score("72", "72", format_score=0.1) == 0.0
    assert gsm8k.compute_score("72", "72", method="flexible", score=2.0) == 2.0
    with pytest.raises(ValueError, match="'strict' or 'flexible'"):
        gsm8k.extract_answer("1", "loose")


@given(st.text(max_size=300), st.integers() | st.decimals(allow_nan=False, allow_infinity=False))
def test_gsm8k_never_raises(text, ground_truth):
    assert gsm8k.compute_score(text, ground_truth, method="flexible") in (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{4}", "4"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{ x }", "x"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ("4", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert mathematics.last_boxed(text) == content


def test_last_boxed_is_linear():
    assert mathematics.last_boxed(r"\boxed{" * 300_000) is None
    assert mathematics.last_boxed(r"\boxed" + " " * 2_000_000) is None


@pytest.mark.parametrize(
    ("source", "text", "ground_truth", "score"),
    [
        ("openai/gsm8k", "#### 72", "72", 1.0),
        ("openai/gsm8k", "72", "72", 0.0),
        ("etude/arithmetic", r"The answer is \boxed{-1,234}.", "-1234", 1.0),
        ("etude/arithmetic", r"The answer is \boxed{12.0}.", "12", 0.0),
        ("etude/arithmetic", "12", "12", 0.0),
        ("lighteval/MATH", r"\boxed{\frac12}", "0.5", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        ("HuggingFaceH4/MATH-500", r"\boxed{2}", "2", 1.0),
    ],
)
def test_default_scorers(source, text, ground_truth, score):
    assert compute_score(source, text, ground_truth, {}) == score


def test_an_unknown_data_source():
    with pytest.raises(ConfigError, match=r"'openai/gsm8'; did you mean 'openai/gsm8k'.*custom_reward_function.path"):
        compute_score("openai/gsm8", "1", "1")


def user_function(tmp_path, source):
    file = tmp_path / "mine.py"
    file.write_text(source)
    return str(file)


ARGUMENTS = {"data_source": "s", "solution_str": "text", "ground_truth": "g", "extra_info": {"a": 1}}


@pytest.mark.parametrize(
    ("signature", "body", "kwargs", "expected"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", "return extra_info['a']", None, 1),
        ("data_source, solution_str, ground_truth, method='strict', score=1.0", "return method", {"method": "x"}, "x"),
        ("solution_str, **rest", "return sorted(rest)", None, ["data_source", "extra_info", "ground_truth"]),
        ("*, ground_truth", "return ground_truth", None, "g"),
        ("**everything", "return everything['b']", {"b": 2}, 2),
    ],
)
def test_a_users_function_gets_what_it_declares(tmp_path, signature, body, kwargs, expected):
    path = user_function(tmp_path, f"def compute_score({signature}):\n    {body}\n")
    assert load_compute_score(path, reward_kwargs=kwargs)(**ARGUMENTS) == expected


def test_a_users_async_function(tmp_path):
    path = user_function(tmp_path, "async def judge(solution_str, ground_truth):\n    return 0.25\n")
    assert asyncio.run(load_compute_score(path, "judge")(**ARGUMENTS)) == 0.25


@pytest.mark.parametrize(
    ("source", "kwargs", "message"),
    [
        ("compute_score = 3", None, "is not a function but of type int"),
        (
            "def other(): pass",
            None,
            r"^custom_reward_function: .* has no 'compute_score' \(it defines other\); name one of",
        ),
        ("def compute_score(text, truth): pass", None, "requires 'text', which nothing provides"),
        ("def compute_score(solution_str, /): pass", None, "requires 'solution_str'"),
        (
            "def compute_score(solution_str): pass",
            {"metod": 1},
            r"has no custom_reward_function.reward_kwargs.metod",
        ),
        ("raise KeyError('x')", None, "cannot import"),
    ],
)
def test_a_users_function_that_cannot_be_used(tmp_path, source, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        load_compute_score(user_function(tmp_path, source), reward_kwargs=kwargs)


@pytest.mark.parametrize("value", [1, 0.5, True, None])
def test_rewards(value):
    assert as_reward(value, "x") == float(value or 0)


@pytest.mark.parametrize(
    "value", ["1", b"1", [1.0], float("nan"), float("-inf"), 10**400, -1e31, object(), 1j, np.complex64(1)]
)
def test_what_is_no_reward(value):
    with pytest.raises(InfrastructureError, match=r"^the source returned"):
        as_reward(value, "the source")


def test_an_argument_given_twice_is_no_call_of_bfcl():
    assert bfcl.compute_score("[add(a=2, a=1)]", [{"add": {"a": [1]}}])["score"] == 0.0
    assert bfcl.compute_score("[add(a=1)]", [{"add": {"a": [1]}}])["score"] == 1.0


def test_arguments_of_punctuation_alone_differ_in_bfcl():
    wanted = [{"calculate": {"op": ["*"]}}]
    for sign, score in (("*", 1.0), ("-", 0.0), ("", 0.0), ("/", 0.0)):
        assert bfcl.compute_score(f'[calculate(op="{sign}")]', wanted)["score"] == score


def test_an_error_that_repeats_the_query_has_retrieved_nothing():
    call = SimpleNamespace(response="Error: nothing found for 'Paris'", error="not found")
    seen = SimpleNamespace(tool_calls=[call], messages=[])
    found = search_r1.compute_score("<answer>Rome</answer>", {"target": ["Paris"]}, seen, retrieval_score=0.1)
    assert found["retrieved"] == 0.0
