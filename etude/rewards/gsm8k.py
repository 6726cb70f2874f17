"""Scoring of grade-school mathematics (GSM8K): the final number of a solution against the reference number.

Invariant: numbers are compared as numbers ("1,000", "$1000" and "1000.0" are one answer). `strict` reads the last
`#### <number>` near the end of the text, `flexible` the last number anywhere in it.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from etude.rewards.truth import reads_truth, truths_of

Method = Literal["strict", "flexible"]

_TAIL = 300  # characters: the answer is at the end, and searching stays cheap on long texts
_FLEXIBLE_TAIL = 20_000
_MARKED = re.compile(r"####[ \t]*\$?[ \t]*(-?\$?[0-9.,]{1,100})")
_NUMBER = re.compile(r"-?\$?[0-9][0-9.,]{0,99}|-?\.[0-9]{1,99}")


def extract_answer(text: str, method: Method = "strict") -> str | None:
    """Returns the answer in `text` without thousands separators and currency signs; None if there is none.

    Raises:
        ValueError: `method` is neither "strict" nor "flexible".
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method must be 'strict' or 'flexible', not {method!r}")
    found = _MARKED.findall(text[-_TAIL:]) if method == "strict" else _NUMBER.findall(text[-_FLEXIBLE_TAIL:])
    for candidate in reversed(found):
        cleaned = _clean(candidate)
        if _number(cleaned) is not None:
            return cleaned
    return None


@reads_truth(truths_of)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Returns `score` for the right number, `format_score` for another number, 0.0 if there is no answer.

    Raises:
        DataError: there is no `ground_truth`.
    """
    truths = truths_of(ground_truth)
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if any(_same(answer, truth) for truth in truths) else format_score


def _same(answer: str, ground_truth: str) -> bool:
    reference = extract_answer(ground_truth, "strict") if "####" in ground_truth else _clean(ground_truth)
    if reference is None:
        return False
    number = _number(reference)
    return number == _number(answer) if number is not None else answer == reference


def _clean(text: str) -> str:
    return text.strip().replace(",", "").replace("$", "").rstrip(".")


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
