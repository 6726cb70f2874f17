"""Copying the question earns nothing in mathematics, and what only looks copied still earns its reward."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from etude.rewards import compute_score
from etude.rewards.answers import is_echo
from etude.rewards.boxed import last_boxed

MATH = Path(__file__).parents[3] / "shared" / "data" / "math500" / "test.jsonl"


def score(question, answer, truth, source="HuggingFaceH4/MATH-500", form=r"\boxed{{{}}}"):
    asked = SimpleNamespace(messages=[{"role": "user", "content": question}])
    found = compute_score(source, form.format(answer), truth, None, asked)
    return found["acc"] if isinstance(found, dict) else found


@pytest.mark.parametrize(
    ("question", "answer", "truth"),
    [
        (r"Simplify $\sqrt{242}$.", r"\sqrt{242}", r"11\sqrt2"),
        ("What is $513^2 - 487^2$?", "513^2-487^2", "26000"),
        ("What is $513^2 - 487^2$?", "What is $513^2 - 487^2$?", "26000"),
        (r"Write $\frac{3}{20}$ as a decimal.", r"\dfrac{3}{20}", "0.15"),
        (r"Compute $\dbinom{31}{28}$.", r"\dbinom{31}{28}", "4495"),
        ("Factor $ab+5b+2a+10$.", "ab + 5b + 2a + 10", "(a+5)(b+2)"),
        ("What is the sum of the proper divisors of 284?", "the sum of the proper divisors of 284", "284.0"),
    ],
)
def test_a_copied_question_is_no_answer(question, answer, truth):
    assert score(question, answer, truth) == 0.0
    assert score(question, answer, truth, "numina_olympiads") == 0.0
    assert score(question, answer, truth, "math_dapo", "Answer: {}") == 0.0


@pytest.mark.parametrize(
    ("question", "answer", "truth"),
    [
        (r"What is $\sqrt{5}$ in simplest radical form?", r"\sqrt{5}", r"\sqrt5"),
        ("Which is larger, $9/2$ or $4$?", "9/2", r"\frac{9}{2}"),
        ("Is it 12 apples or 13 apples?", "12 apples", "12"),
        (r"Is $p = 0.5$ likelier than 0.4? Give the likelier.", "0.5", r"\frac{1}{2}"),
        ("Simplify $a+b+a+c$.", "2a+b+c", "c+b+2a"),
        ("What is $x$?", "x", "x"),
    ],
)
def test_an_answer_that_the_question_names_is_right(question, answer, truth):
    assert score(question, answer, truth) == 1.0


@pytest.mark.skipif(not MATH.is_file(), reason="MATH-500 is not beside this checkout")
def test_no_question_of_math_500_answers_itself():
    """Whatever of a question is boxed: what is not refused as a copy is the reference answer in its own notation."""
    refused = 0
    for row in map(json.loads, MATH.read_text().splitlines()):
        question, truth = row["problem"], row["answer"]
        assert not is_echo(last_boxed(row["solution"]), truth, question), truth
        formulas = [
            each
            for found in re.findall(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]", question, re.S)
            for each in found
            if each
        ]
        refused += any(is_echo(each, truth, question) for each in formulas)
        assert len(question) > 1000 or is_echo(question, truth, question)
    assert refused > 250
