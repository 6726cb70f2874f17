"""Scoring of mathematics: the last boxed answer of a solution against the reference, as mathematics (see `answers.py`)."""

from __future__ import annotations

import re

from etude.rewards.answers import answers_equal

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE_STEP = {"{": 1, "}": -1}


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` with balanced braces; None if there is none or the last is unfinished."""
    start = None
    for match in _BOXED.finditer(text):
        start = match.end()
    if start is None:
        return None
    depth, position = 1, start
    while position < len(text):
        depth += _BRACE_STEP.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
        position += 2 if text[position] == "\\" else 1  # an escaped brace is literal
    return None


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 when the last boxed answer equals `ground_truth`, else 0.0."""
    answer = last_boxed(solution_str)
    return 1.0 if answer is not None and answers_equal(answer, str(ground_truth)) else 0.0


def integer_score(solution_str: str, ground_truth: str) -> float:
    """1.0 when the last boxed answer is exactly the integer `ground_truth`, else 0.0.

    Raises:
        ValueError: `ground_truth` is not an integer.
    """
    answer = re.fullmatch(r"[+-]?\d{1,200}", (last_boxed(solution_str) or "").replace(",", "").replace(" ", ""))
    return 1.0 if answer and int(answer.group()) == int(ground_truth) else 0.0
