"""Copying the question earns nothing in mathematics, and what only looks copied still earns its reward."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_rewards_manager import built, trajectory
from test_rewards_manager import row as row_of

from etude.agents.compaction import with_summary
from etude.rewards import TrajectoryScorer, compute_score
from etude.rewards.answers import answers_equal, is_echo, is_unworked
from etude.rewards.boxed import last_boxed
from etude.rewards.view import TrajectoryView, question_of
from etude.trajectory import Trajectory

MATH = Path(__file__).parents[3] / "shared" / "data" / "math500" / "test.jsonl"


def score(question, answer, truth, source="HuggingFaceH4/MATH-500", form=r"\boxed{{{}}}", compacted=False):
    asked = SimpleNamespace(prompt=[{"role": "user", "content": question}], compacted=compacted)
    found = compute_score(source, form.format(answer), truth, None, asked)
    return found["acc"] if isinstance(found, dict) else found


def test_what_the_model_found_before_a_compaction_is_not_the_questions():
    """A summary of the model's own stands below the question: an answer in it is no copy."""
    [message] = with_summary([{"role": "user", "content": "How much of the pie is left?"}], r"It is $\frac{3}{4}$.")
    assert score(message["content"], r"\frac{3}{4}", "0.75", compacted=True) == 1.0
    assert score(message["content"], "0.75", r"\frac{3}{4}", compacted=True) == 1.0


def test_a_summary_that_the_user_wrote_is_part_of_the_question():
    asked = "Summary of the conversation so far:\nAnn asked about a sum.\nWhat is $513^2 - 487^2$?"
    made = Trajectory("r", [1], messages=[{"role": "user", "content": asked}])
    view = TrajectoryView.of(made)
    assert (question_of(view), view.as_asked) == (asked, made.messages)
    assert compute_score("HuggingFaceH4/MATH-500", r"\boxed{513^2-487^2}", "26000", None, view) == 0.0


def test_what_a_tool_or_a_user_said_later_is_not_the_questions():
    """A template without a tool role shows a tool's answer in a message of the user's."""
    made = trajectory(("solve", "2*sqrt(3)"), (r"\boxed{2*sqrt(3)}", ""))
    texts = ("What solves x^2 = 12?", "solve", "<tool_response>2*sqrt(3)</tool_response>", r"\boxed{2*sqrt(3)}")
    made.messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts)]
    of = built()
    asyncio.run(TrajectoryScorer(of)(made, row_of(r"2\sqrt{3}", "lighteval/MATH")))
    assert made.rewards.score == 1.0


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
        (r"Write $\frac{3}{20}$ as a decimal.", r"x = \frac{3}{20}", "0.15"),
        (r"Write $\frac{3}{20}$ as a decimal.", r"\frac{3}{20} = 3/20", "0.15"),
        ("Write 3/20 as a decimal.", r"\frac{3}{20} \text{ cm}", "0.15"),
        (r"Simplify $\frac{18}{24}$.", "The answer is 18/24", r"\frac{3}{4}"),
        (r"Convert $0.\overline{36}$ to a fraction.", r"\text{It is } 0.\overline{36}", r"\frac{4}{11}"),
        ("Express $0.6$ as a common fraction.", r"\approx +0.60", r"\frac{3}{5}"),
        (r"Write $-\frac{3}{20}$ as a decimal.", "-3/20", "-0.15"),
        (r"Write $25\%$ as a decimal.", r"x = 25\%", "0.25"),
        ("Write $1{,}200{,}000$ in scientific notation.", "1200000", r"1.2 \times 10^6"),
    ],
)
def test_a_copied_question_is_no_answer(question, answer, truth):
    assert score(question, answer, truth) == 0.0
    assert score(question, answer, truth, "numina_olympiads") == 0.0
    assert score(question, answer, truth, "hiyouga/geometry3k", r"<think>so</think>\boxed{{{}}}") == 0.0
    assert score(question, answer, truth, "math_dapo", "Answer: {}") == 0.0


@pytest.mark.parametrize(
    ("question", "answer", "truth"),
    [
        ("What is $513^2 - 487^2$?", "513^2-487^2+0", "26000"),
        ("What is $513^2 - 487^2$?", "N = 513^2-487^2", "N = 26000"),
        ("Simplify $y = 2x+3x$.", "y = 3x+2x", "y = 5x"),
        ("Solve $a = b - c$ for $c$.", "a = b - c", "c = b - a"),
        ("Write $2x+5=y$ in slope-intercept form.", "2x+5=y", "y=2x+5"),
        ("Factor $y = x^2-1$.", "y = x^2-1", "y=(x-1)(x+1)"),
        ("What is $513^2 - 487^2$?", "(513)^2-(487)^2", "26000"),
        ("What is 513²−487²?", r"513\cdot513-487\cdot487", "26000"),
        ("Compute (3 + 4) * 5.", "5*(4+3)", "35"),
        (r"Compute $\sin\pi$.", r"\sin\pi+\sin\pi", "0"),
        ("What is $x$, if $x = 3^5 - 1$?", "x = 3^5 - 1 + 0", "242"),
        ("Factor $ab+5b+2a+10$.", "2a+10+5b+ab", "(a+5)(b+2)"),
        ("Factor $ab+5b+2a+10$.", "ab+5b+2a+10+1-1", "(a+5)(b+2)"),
        ("Expand $(x+1)(x-1)$.", "(x-1)(x+1)", "x^2-1"),
        (r"Simplify $\sqrt{242}$.", r"1\sqrt{242}", r"11\sqrt2"),
        ("What is 12 × 7 + 5?", r"12 \cdot 7 + 5", "89"),
        ("What is 12 x 7 - 5?", "12*7-5", "79"),
        ("Compute -5 + 3 · 2.", "0-5+3*2", "1"),
        ("Compute 1,200 + 350.", "1200+350", "1550"),
        (r"Compute $1{,}200 + 350$.", "1200+350", "1550"),
        ("What is √144 + 1?", r"\sqrt{144}+1", "13"),
        ("What is ½ + ⅓?", r"\frac12+\frac13", r"\frac56"),
        (r"Compute \begin{align*}3 + 4 \cdot 5\end{align*}", "4*5+3", "23"),
    ],
)
def test_a_rewritten_question_is_no_answer(question, answer, truth):
    assert answers_equal(answer, truth)
    assert score(question, answer, truth) == 0.0
    assert score(question, answer, truth, "numina_olympiads") == 0.0
    assert score(question, answer, truth, "hiyouga/geometry3k", r"<think>so</think>\boxed{{{}}}") == 0.0
    assert score(question, answer, truth, "math_dapo", "Answer: {}") == 0.0


@pytest.mark.parametrize(
    ("question", "answer", "truth"),
    [
        ("What is $513^2 - 487^2$?", "26{,}000", "26000"),
        ("What is $513^2 - 487^2$?", "513^2-487^2 = 26000", "26000"),
        ("What is $513^2 - 487^2$?", "26000 = 513^2-487^2", "26000"),
        ("What is $513^2 - 487^2$?", r"\mathbf{26000}", "26000"),
        ("How many subsets has a set of $10$?", "2^{10}", "1024"),
        ("What is 12 × 7 + 5?", "84+5 = 89", "89"),
        ("How many seats have 12 rows of 7 and 5 chairs?", "12*7+5", "89"),
        ("Factor $ab+5b+2a+10$.", "(b+2)(5+a)", "(a+5)(b+2)"),
        ("Expand $(x+1)^2$.", "2x+x^2+1", "x^2+2x+1"),
        (r"Rationalize $\frac{1}{\sqrt2}$.", r"\frac12\sqrt{2}", r"\frac{\sqrt2}{2}"),
        (r"Simplify $\sqrt{242}$.", r"11 \cdot \sqrt{2}", r"11\sqrt2"),
        (r"What is $\sqrt{5}$ in simplest radical form?", r"\sqrt{5}", r"\sqrt5"),
        ("Which is larger, $9/2$ or $4$?", "9/2", r"\frac{9}{2}"),
        ("Is it 12 apples or 13 apples?", "12 apples", "12"),
        (r"Is $p = 0.5$ likelier than 0.4? Give the likelier.", "0.5", r"\frac{1}{2}"),
        ("Simplify $a+b+a+c$.", "2a+b+c", "c+b+2a"),
        ("What is $x$?", "x", "x"),
        (r"Write $\frac{3}{20}$ as a decimal.", r"\frac{3}{20} = 0.15", "0.15"),
        (r"Write $\frac{3}{20}$ as a decimal.", "x = 0.150", "0.15"),
        ("Of 20 apples 3 are red. Which part is that, as a decimal?", "3/20", "0.15"),
        ("Of $3$, $20$ and no other number: which part is the first?", "3/20", "0.15"),
        ("What number is 2.5 units to the left of zero?", "-2.5", r"-\frac{5}{2}"),
        ("Find the opposite of $0.5$.", "-0.5", r"-\frac{1}{2}"),
        ("Find the opposite of $-0.5$.", "0.5", r"\frac{1}{2}"),
        ("Solve $x + 1.5 = $ zero.", "x = -1.5", r"-\frac32"),
        ("There are 10 cards, exactly one of them an ace. Draw one: how likely is it?", r"10\%", r"\frac{1}{10}"),
        ("25 of a hundred students passed. Which share is that?", r"25\%", r"\frac14"),
        ("Half of what lies in 1-2?", "1/2", "0.5"),
        (r"The angle is $45^\circ$. How large is the one opposite?", r"45^\circ", "45"),
        ("Which passes through $(1,3)$: $y=2x+1$, $y=3x-2$ or $y=x+5$?", "y = 2x+1", "y=2x+1"),
        ("Which passes through $(1,3)$: $y=2x+1$, $y=3x-2$ or $y=x+5$?", "y=2x+1", "2x+1"),
        (r"Is it $x=2$ or $x=\pm 2$ for $x^2=4$?", r"x=\pm 2", r"x=\pm 2"),
        (r"Which lies nearer: $x=\frac12, y=\frac34$ or $x=1, y=0$?", r"x=\frac12, y=\frac34", r"x=\frac12, y=\frac34"),
        (r"Find the inverse of $f(x) = \frac{1}{x}$.", r"f^{-1}(x) = \frac{1}{x}", r"f^{-1}(x)=\frac{1}{x}"),
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


@pytest.mark.slow
@pytest.mark.skipif(not MATH.is_file(), reason="MATH-500 is not beside this checkout")
def test_rewriting_an_exercise_of_math_500_earns_nothing_and_solving_it_does():
    exercises = 0
    for row in map(json.loads, MATH.read_text().splitlines()):
        found = re.match(r"(?:Simplify|Compute|Evaluate|Factor|Expand)[^$]*\$([^$=]+)\$[^$]*\Z", row["problem"])
        if not found or len(found[1]) < 4 or not answers_equal(found[1], row["answer"]):
            continue
        exercises += 1
        for answer in (f"{found[1]} + 0", f"({found[1]})", rf"1 \cdot ({found[1]})", f"y = {found[1]}"):
            assert score(row["problem"], answer, row["answer"]) == 0.0, answer
        for answer in (row["answer"], f"{found[1]} = {row['answer']}", row["answer"].replace("frac", "dfrac")):
            assert score(row["problem"], answer, row["answer"]) == 1.0, answer
    assert exercises > 10


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\sum_{k=1}^{100} k", "5050"),
        (r"\prod_{k=1}^{6} k", "720"),
        (r"\int_0^3 x^2 dx", "9"),
        (r"\max(3,5)", "5"),
        (r"\lim_{x\to 0}\frac{\sin x}{x}", "1"),
        (r"\gcd(12,18)", "6"),
        (r"\lfloor 17/5 \rfloor", "3"),
        (r"7^{100} \mod 13", "9"),
        (r"\operatorname{gcd}(12,18)", "6"),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2"),
        (r"\frac{d}{dx}x^2", "2x"),
    ],
)
def test_an_operation_left_to_the_scorer_earns_nothing(answer, truth):
    assert is_unworked(answer, truth, "What is it?")
    assert not is_unworked(f"{answer}={truth}", truth, "What is it?")
    assert not is_unworked(f"{truth}={answer}", truth, "What is it?")
    assert not is_unworked(answer, answer, "What is it?")


@pytest.mark.parametrize("answer", [r"3 \pmod 7", r"x \equiv 3 \pmod{7}", r"3 (\mod 7)"])
def test_a_residue_is_worked_out(answer):
    assert not is_unworked(answer, "3", "What is it?")


OPTIONS = r"What is 3 times 6? $\textbf{(A)}\ 16\qquad\textbf{(B)}\ 17\qquad\textbf{(C)}\ 18\qquad\textbf{(D)}\ 19$"


@pytest.mark.parametrize("source", ["HuggingFaceH4/MATH-500", "numina_amc_aime"])
@pytest.mark.parametrize("truth", ["C", "(C)", r"\text{C}", "18", r"\textbf{(C)}\ 18"])
def test_an_option_is_its_letter_and_its_value(source, truth):
    labelled = (r"\textbf{(C)}\ 18", r"\text{(C) }18", "(C) 18", r"\mathrm{(C)}\quad 18", r"\textbf{(C) 18}")
    letters = ("C", "(C)", r"\textbf{(C)}") if truth != "18" else ()
    values = ("18",) if "18" in truth else ()
    for answer in (*labelled, *letters, *values):
        assert score(OPTIONS, answer, truth, source) == 1.0, answer
    for answer in ("D", "(D)", r"\textbf{(D)}\ 19", "19", r"(C) 18, (D) 19", "(C) or (D)", "(C) D", r"\textbf{(B)}\ C"):
        assert score(OPTIONS, answer, truth, source) == 0.0, answer


@pytest.mark.parametrize(
    "form", ["Answer: ${}$, as there are 2 cases.", "Answer: ${}$. This is it.", "Answer: {} since 3 divides it"]
)
def test_a_reason_makes_no_question_of_an_answer_and_no_answer_of_a_question(form):
    question = r"Evaluate $12 \cdot 7 + 5$."
    assert score(question, "89", "89", "math_dapo", form) == 1.0
    assert score(question, r"12 \cdot 7 + 5", "89", "math_dapo", form) == 0.0


def test_a_letter_in_parentheses_may_be_a_factor():
    assert score("Multiply.", "(A)(B)", "AB") == 1.0
    assert score("Multiply.", "(A) x", "Ax") == score("Add.", "(A) + 18", "A+18") == 1.0
    assert score("Multiply.", "(C) 18", "17") == 0.0
    assert score("Multiply.", r"\textbf{(D)}\ 18", r"\textbf{(C)}\ 18") == 0.0
