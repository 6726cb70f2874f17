"""A ground truth that is not there: no built-in scorer compares with it, and one that only looks false is compared with."""

import math

import numpy as np
import pytest

from etude.errors import DataError
from etude.rewards import SCORERS, compute_score, judge, load_compute_score
from etude.rewards.default import FAMILIES, check_truth
from etude.rewards.truth import truths_of

SOURCES = [*SCORERS.names(), *(f"{prefix}x" for prefix in FAMILIES)]
MISSING = [None, "", " \n", math.nan, np.float32("nan"), {}, [None, ""], {"target": []}, {"target": ["", None]}]
SAID = [r"\boxed{None}", "#### 5", "Answer: nan", "<answer></answer>", "<answer>None</answer>", ""]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("truth", MISSING, ids=repr)
def test_no_scorer_compares_with_what_is_not_there(source, truth):
    with pytest.raises(DataError, match="ground_truth"):
        check_truth(source, truth)
    for text in SAID:
        with pytest.raises(DataError, match="ground_truth"):
            compute_score(source, text, truth)


def test_an_empty_list_is_a_ground_truth_for_calls_only():
    for source in SOURCES:
        if "bfcl" in source or source.startswith("gorilla"):
            check_truth(source, [])
            check_truth(source, [{"now": {}}])
        else:
            with pytest.raises(DataError, match="ground_truth"):
                check_truth(source, [])


@pytest.mark.parametrize("truth", [0, 0.0, "0", np.int64(0), ["0"], {"target": [0]}], ids=repr)
def test_zero_is_a_ground_truth(truth):
    for source, text in {
        "openai/gsm8k": "#### {}",
        "HuggingFaceH4/MATH-500": r"\boxed{{{}}}",
        "numina_olympiads": r"\boxed{{{}}}",
        "hiyouga/geometry3k": r"<think>x</think>\boxed{{{}}}",
        "math_dapo": "Answer: {}",
    }.items():
        scores = [compute_score(source, text.format(number), truth) for number in (0, 1)]
        right, wrong = [each["score"] if isinstance(each, dict) else each for each in scores]
        assert right == 1.0 > wrong


def test_any_of_several_reference_answers_is_right_but_never_the_missing_one():
    for text, score in (("7", 1.0), ("8", 1.0), ("9", 0.0), ("None", 0.0), ("", 0.0)):
        assert compute_score("openai/gsm8k", f"#### {text}", ["7", None, 8, ""]) == score
        assert compute_score("HuggingFaceH4/MATH-500", rf"\boxed{{{text}}}", np.array(["7", "8", ""])) == score
        assert compute_score("nq", f"<answer>{text}</answer>", {"target": ["7", None, 8, ""]}) == score
    assert truths_of([False, None]) == ["False", "no"]


def test_yes_and_no_are_true_and_false():
    """The answers of StrategyQA are booleans, and its prompts ask for yes or no."""
    for truth, right, wrong in ((True, "Yes", "no"), (np.bool_(False), "no.", "yes"), ([False], "False", "True")):
        assert compute_score("strategyqa", f"<answer>{right}</answer>", truth) == 1.0
        assert compute_score("strategyqa", f"<answer>{wrong}</answer>", truth) == 0.0
    assert compute_score("nq", "<answer>yes</answer>", "True") == 0.0  # a text is what it says


def test_an_integer_is_asked_for():
    with pytest.raises(DataError, match="must be an integer"):
        compute_score("etude/arithmetic", r"\boxed{1}", "1.5")


def test_a_users_function_may_do_without_a_ground_truth(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(ground_truth, solution_str):\n    return ground_truth is None\n"
    )
    mine = load_compute_score(str(tmp_path / "mine.py"))
    assert mine(data_source="openai/gsm8k", solution_str="x", ground_truth=None, extra_info={}) is True
    assert judge._quote(None) == ""


@pytest.mark.parametrize("truth", [b"5", [["5", "6"]], [{"text": "5"}]], ids=repr)
def test_a_ground_truth_that_no_answer_can_be_spelled_like_is_refused(truth):
    for source in ("openai/gsm8k", "HuggingFaceH4/MATH-500", "nq", "TencentARC/Video-Holmes"):
        with pytest.raises(DataError, match="ground_truth"):
            check_truth(source, truth)


@pytest.mark.parametrize("source", ["HuggingFaceH4/MATH-500", "math_dapo", "numina_olympiads", "hiyouga/geometry3k"])
def test_a_whole_solution_is_no_reference_answer(source):
    solution = "We add. " * 200 + r"\boxed{5}"
    with pytest.raises(DataError, match="the answer, not the solution"):
        check_truth(source, solution)
    check_truth(source, [solution, "5"])


@pytest.mark.parametrize("truth", ["forty two", "1/2", "5 apples", ["x"], "so it is 5 ####"])
def test_gsm8k_asks_for_a_number(truth):
    with pytest.raises(DataError, match="ground_truth must be a number"):
        check_truth("openai/gsm8k", truth)


def test_a_float_is_what_it_was_written_as():
    assert truths_of([0.1 + 0.2, 1e21, 5.0, np.float32(0.1)]) == ["0.3", "1" + "0" * 21, "5", "0.1"]
    assert compute_score("openai/gsm8k", "#### 0.3", 0.1 + 0.2) == 1.0
    assert compute_score("HuggingFaceH4/MATH-500", r"\boxed{0.3}", 0.1 + 0.2) == 1.0
