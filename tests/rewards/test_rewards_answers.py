"""Scorers of geometry, choices and short answers."""

import json
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rewards import choice, compute_score, geo3k, gsm8k, math_dapo, qa
from etude.rewards.default import score_row
from etude.trajectory import Rewards

NQ = Path(__file__).parents[3] / "shared" / "data" / "nq_open" / "nq_open_dev.jsonl"


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("<think>so</think> \\boxed{5}", 1.0),
        ("\\boxed{5}", 0.9),
        ("<think>so</think> \\boxed{6}", 0.1),
        ("<think>\\boxed{5}</think>", 0.9),
        (" <think>so</think> \\boxed{5}", 0.9),
        ("5", 0.0),
        ("", 0.0),
    ],
)
def test_geometry(solution, score):
    assert geo3k.compute_score(solution, "5") == pytest.approx(score)
    found = score_row(data_source="hiyouga/geometry3k", solution_str=solution, ground_truth="5")
    assert found["score"] == pytest.approx(score)
    assert Rewards(score=found["score"], score_info=found).succeeded(found["score"]) is (score >= 0.9)


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
        ("It is A man", None),
        ("It is A or B.", None),
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
        ("Beyonce\u0301", ["Beyoncé"], True),
        ("北京。", ["北京"], True),
        ("红楼梦", ["《红楼梦》"], True),
        ("ＮＢＡ", ["NBA"], True),
        ("ｶﾞﾝﾀﾞﾑ", ["ガンダム"], True),
        ("«Le Monde»", ["Le Monde"], True),
        ("¿Qué?", ["qué"], True),
        ("x²", ["x2"], False),
        ("5½", ["51/2"], False),
        ("5‰", ["5"], False),
        ("5′", ["5″"], False),
        ("3、5", ["35"], False),
        ("3·5", ["35"], False),
        ("列奥纳多·达·芬奇", ["列奥纳多达芬奇"], True),
    ],
)
def test_exact_match(prediction, answers, right):
    assert qa.exact_match(prediction, answers) is right


@given(st.text(string.printable, max_size=40))
def test_ascii_is_compared_as_in_squad(text):
    bare = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(dict.fromkeys(map(ord, string.punctuation))))
    assert qa.normalise(text) == (" ".join(bare.split()) or " ".join(text.lower().split()))


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


@pytest.mark.parametrize(
    "text",
    [
        "3, 4",
        "3 | 4",
        "3; 4",
        "3 (or 4)",
        "3 x 4",
        "3 plus 4",
        "3 thousand",
        "3 Lakh",
        "3 plus six",
        "3 feet six inches",
        "3 divided by two",
        "3 quadrillion",
        "3k",
        "3!",
        "3%4",
        "3=4",
        "3 4",
        "3或4",
        "3 & 4",
        "3 times 4",
        "3 not 4",
        "3\\frac12",
        "3 1/2",
        "3½",
        "3:4",
        "3~4",
        "3E1",
        "3 \\div 4",
        "3 **2",
        "3 … 4",
    ],
)
def test_a_number_among_others_is_no_answer_to_gsm8k(text):
    assert gsm8k.compute_score(f"#### {text}", "3") == 0.0


def test_commas_of_a_list_do_not_make_a_number_for_gsm8k():
    assert gsm8k.compute_score("#### 1,2", "12") == gsm8k.compute_score("#### 1,0,0", "100") == 0.0
    assert gsm8k.compute_score("#### 1,00,000", "100000") == gsm8k.compute_score("#### 12,345.", "12345") == 1.0


@pytest.mark.parametrize("text", ["+3", "€3", "3 apples for 2 people", "3 (2 + 1)", "3, that is all", "3%"])
def test_gsm8k_reads_signs_and_what_follows_in_words(text):
    assert gsm8k.compute_score(f"#### {text}", "3") == 1.0
    assert gsm8k.compute_score("#### −3", "-3") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "Answer: A or B",
        "<answer>A, B</answer>",
        "Answer: A and B",
        "A, B, C, D",
        "Answer: A, B, C or D",
        "Answer: A|B",
        "<answer>(A)(B)</answer>",
        "Answer: A (or B)",
        "Answer: A & B",
        "Answer: A, or maybe B",
        "答案：A或B",
        r"\boxed{B}, \boxed{C}, \boxed{D}, \boxed{A}",
        r"\boxed{\text{B}} or \boxed{\text{A}}",
        "The answer is $A$ or $B$.",
        r"The answer is \(A\), \(B\)",
        r"The answer is $\text{A}$ or $\text{B}$",
        r"\boxed{\text{A} or \text{B}}",
        r"\boxed{\text{A} \text{ and } \text{B}}",
        "The answer is 'A' or 'B'",
        "The answer is “A” and “B”",
        "I'll go with A or B",
    ],
)
def test_several_options_are_no_choice(text):
    assert choice.compute_score(text, "A") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{\textbf{(C)}}",
        r"\boxed{\mathrm{C}}",
        r"\boxed{A}. No, \boxed{C}",
        r"\boxed{\text{C. x, y}}. \boxed{C}",
        r"\boxed{C}. The area is \boxed{5}",
        "答案是C",
        "答案：C",
        "故选C",
        "答案是C。选项A错误",
        "<answer>C. Paris, France</answer>",
        "Answer: C, because A or B are wrong",
        "Answer: C, A man said",
        "C) Paris and London",
        "It is C.",
        "It's (C)",
        "C) Vitamin K. For clotting it is K.",
        "C. The unit of current is the ampere: it is A.",
        "Option A fails: it is B, not prime; choose option C",
        "It's not B. It is C, since A melts",
        r"The answer is $\text{C}$.",
        r"The answer is $\textbf{(C) }$ Paris.",
        r"The answer is \textbf{C}.",
        "The answer is $C$, as $A$ or $B$ fail",
        r"\boxed{C.}",
        r"\boxed{\textbf{(C)}\ \frac{1}{2}}",
        r"\boxed{\text{C}: \text{Paris}}",
        "The answer is C ($K = 3$).",
        r"The answer is (C), \(N = 5\).",
        "I'll go with C.",
        "It must be C.",
    ],
)
def test_one_option_is_a_choice_in_any_dress(text):
    assert choice.compute_score(text, "C") == 1.0


@pytest.mark.parametrize("text", ["答案：5", "Answer：5"])
def test_dapo_reads_the_chinese_mark(text):
    assert math_dapo.compute_score(text, "5")["acc"] == 1.0
