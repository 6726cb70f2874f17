"""Scoring of mathematics: the last boxed answer of a solution against the reference, as mathematics (see `answers.py`)."""

from __future__ import annotations

import re

from etude.rewards.answers import answers_equal
from etude.rewards.boxed import last_boxed

__all__ = ["answers_equal", "compute_score", "integer_score", "last_boxed"]


def compute_score(solution_str: str, ground_truth: str) -> float:
    """Returns 1.0 if the last boxed answer equals `ground_truth`, else 0.0."""
    answer = last_boxed(solution_str)
    return 1.0 if answer is not None and answers_equal(answer, str(ground_truth)) else 0.0


def integer_score(solution_str: str, ground_truth: str) -> float:
    """Returns 1.0 if the last boxed answer is exactly the integer `ground_truth`, else 0.0.

    Raises:
        ValueError: `ground_truth` is not an integer.
    """
    answer = re.fullmatch(r"[+-]?\d{1,200}", (last_boxed(solution_str) or "").replace(",", "").replace(" ", ""))
    return 1.0 if answer and int(answer.group()) == int(ground_truth) else 0.0
