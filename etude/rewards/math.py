"""Scoring of mathematics: the last boxed answer of a solution against the reference, as mathematics.

Invariant: `answers_equal` always returns, from any thread, whatever the model wrote. Equal strings and plain numbers are
decided here; the rest is symbolic algebra, in which a short expression can hang inside one C call, so it runs in a child
process that is killed at its time limit (see `algebra.py`). An answer undecided by then counts as wrong.
"""

from __future__ import annotations

import re
from fractions import Fraction

from etude.rewards.algebra import AlgebraProcesses

MAX_ANSWER_CHARS = 1000
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE_STEP = {"{": 1, "}": -1}
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d{1,200}(?:\.\d{0,200})?|\.\d{1,200})")
_PLAIN_FRACTION = re.compile(r"([+-]?\d{1,200})/(\d{1,200})|([+-]?)\\d?t?frac\{(\d{1,200})\}\{(\d{1,200})\}")
_GLUE = re.compile(r"\\[,!;: ]|\\(?:left|right)(?![a-zA-Z])|[\s$]")
_algebra = AlgebraProcesses()


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


def answers_equal(prediction: str, ground_truth: str) -> bool:
    """Whether two answers (LaTeX or plain) mean the same; False for one of more than 1,000 characters.

    Raises:
        InfrastructureError: the child process for symbolic algebra cannot be started.
    """
    if len(prediction) > MAX_ANSWER_CHARS or len(ground_truth) > MAX_ANSWER_CHARS:
        return False
    ours, theirs = _plain(prediction), _plain(ground_truth)
    if not ours or not theirs:
        return False
    if ours == theirs:
        return True
    numbers = _number(ours), _number(theirs)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return _algebra.equal(_latex(prediction), _latex(ground_truth))


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


def _plain(text: str) -> str:
    return _GLUE.sub("", text).rstrip(".")


def _latex(text: str) -> str:
    """`text` with the two plain spellings that models mix into LaTeX: `pi` and `sqrt(…)`."""
    spelled = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", text.strip().strip("$"))
    return re.sub(r"(?<![\\a-zA-Z])sqrt\(([^()]*)\)", r"\\sqrt{\1}", spelled)


def _number(text: str) -> Fraction | None:
    """`text` as an exact number when it is a plain decimal or a fraction of integers."""
    bare = re.sub(r",(?=\d{3}(?!\d))", "", text)
    if _PLAIN_NUMBER.fullmatch(bare):
        return Fraction(bare)
    match = _PLAIN_FRACTION.fullmatch(bare)
    if match is None:
        return None
    top, bottom = (match[1], match[2]) if match[1] else (match[3] + match[4], match[5])
    return Fraction(int(top), int(bottom)) if int(bottom) else None
