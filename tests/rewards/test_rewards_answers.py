"""Scorers of geometry, choices and short answers."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rewards import choice, compute_score, geo3k, qa
from etude.rewards.default import score_row

NQ = Path(__file__).parents[3] / "shared" / "data" / "nq_open" / "nq_open_dev.jsonl"


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("<think>so</think> \\boxed{5}", 1.0),
        ("\\boxed{5}", 0.9),
        ("<think>so</think> \\boxed{6}", 0.1),
        ("<think>\\boxed{5}</think>", 0.9),
        (" <think></think>\\boxed{5}", 0.9),
        ("5", 0.0),
        ("", 0.0),
    ],
)
def test_geometry(solution, score):
    assert geo3k.compute_score(solution, "5") == pytest.approx(score)
    assert compute_score("hiyouga/geometry3k", solution, "5") == pytest.approx(score)


def test_geometry_without_a_box_is_the_whole_text():
    assert geo3k.compute_score("10/2", "5", use_boxed=False, format_score=0.0) == 1.0
    assert geo3k.compute_score("it is 5", "5", use_boxed=False, format_score=0.0) == 1.0
    assert geo3k.compute_score("5 or 6", "5", use_boxed=False, format_score=0.0) == 0.0


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" (c) ", "C"),
        ("D. The man left", "D"),
        ("**A**", "A"),
        ("<think>A</think><answer> b </answer>", "B"),
        ("<answer>A</answer> no, <answer>C</answer>", "C"),
        ("So the answer is: E", "E"),
        ("the correct option is (F).", "F"),
        ("\\boxed{\\text{B}}", "B"),
        ("A man walks in", None),
        ("I think so", None),
        ("Because", None),
        ("", None),
    ],
)
def test_choices(text, letter):
    assert choice.extract_choice(text) == letter


@pytest.mark.parametrize("truth", ["B", "b", "(B)", "B."])
def test_a_reference_choice_may_be_in_parentheses(truth):
    assert choice.compute_score("<answer>B</answer>", truth) == 1.0
    assert choice.compute_score("<answer>C</answer>", truth) == 0.0


@pytest.mark.parametrize(
    ("text", "truth", "answer"),
    [
        ("<answer>A red kite.</answer>", "a red kite", "a red kite"),
        ("<answer>B</answer>", ["B", "a red kite"], "B"),
        ("It is a red kite", "a red kite", "it is a red kite"),
        ("<answer> </answer>", "a red kite", None),
    ],
)
def test_the_answer_that_is_reported_is_the_one_that_is_compared(text, truth, answer):
    found = score_row(data_source="TencentARC/Video-Holmes", solution_str=text, ground_truth=truth)
    assert found["pred"] == answer
    assert found["score"] == found["acc"] == (answer in ("a red kite", "B"))


@given(st.text(max_size=200))
def test_any_text_has_a_letter_or_none(text):
    letter = choice.extract_choice(text)
    assert letter is None or (len(letter) == 1 and letter.isalpha() and letter == letter.upper())


def test_hostile_text_takes_no_time():
    for unit in ("<answer>", "answer is ", "\\boxed{", "(" * 3):
        assert choice.extract_choice(unit * 200_000) is None
        assert qa.extract_answer(unit * 200_000) is None


@pytest.mark.parametrize(
    ("prediction", "answers", "right"),
    [
        ("The Beatles!", ["beatles"], True),
        ("Bobby  Scott", ["Bob Russell", "bobby scott"], True),
        ("Beijing", "beijing", True),
        ("Beijing, China", ["Beijing"], False),
        ("", ["x"], False),
    ],
)
def test_exact_match(prediction, answers, right):
    assert qa.exact_match(prediction, answers) is right


def test_f1():
    assert qa.f1("the cat sat", ["a cat sat down"]) == pytest.approx(0.8)
    assert qa.f1("x", ["y", "x"]) == 1.0
    assert qa.f1("x", []) == 0.0
    assert qa.f1("x x", ["x"]) == pytest.approx(2 / 3)


def test_a_solution_is_judged_by_its_last_answer_after_its_thoughts():
    solution = "<think><answer>Paris</answer></think><answer>Rome</answer> <answer> The Beijing. </answer>"
    for ground_truth in ({"target": ["Beijing"]}, ["Beijing"], "Beijing"):
        assert compute_score("searchR1_nq", solution, ground_truth) == 1.0
    assert compute_score("nq", "<think><answer>Paris</answer></think>", {"target": ["Paris"]}) == 0.0


@pytest.mark.skipif(not NQ.is_file(), reason="NQ-Open is not beside this checkout")
def test_every_reference_answer_is_right():
    for line in NQ.read_text().splitlines()[:500]:
        answers = json.loads(line)["answers"]
        assert all(qa.exact_match(answer, answers) and qa.f1(answer, answers) == 1.0 for answer in answers)
