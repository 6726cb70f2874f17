"""Scoring of grade-school mathematics (GSM8K): the final number of a solution against the reference number.

Invariant: numbers are compared as numbers ("1,000", "$1000" and "1000.0" are one answer). `strict` reads the last
`#### <number>` (or `#### The answer is <number>`) near the end of the text, `flexible` the last number anywhere in it. The
beginning of an expression or of several numbers ("5*4", "3 or 4") is no number, and leaves no earlier one to count.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from etude.errors import DataError
from etude.rewards.numeral import ALTERNATIVE, CONTINUATION, MAGNITUDES
from etude.rewards.truth import reads_truth, truths_of

Method = Literal["strict", "flexible"]

_TAIL = 300  # characters: the answer is at the end, and searching stays cheap on long texts
_FLEXIBLE_TAIL = 20_000
_NAMED = r"(?i:\*{0,2}(?:the[ \t]+)?(?:final[ \t]+)?answer(?:[ \t]+is)?[ \t]*:?\*{0,2})"
_MARKED = re.compile(
    rf"####[\s:]{{0,9}}(?:{_NAMED}\s{{0,9}})?"
    r"(?:[a-zA-Z][ \t]*=[ \t]*)?"
    r"(?:\*\*?|`|\$(?=\\\$)|(?:\$\$?|\\[(\[])?\s{0,9}\\boxed\{|\\\()?\\?[$€£¥]?[ \t]*([-+−]?[$€£¥]?[0-9.,]{1,100})"
    rf"(?![0-9.,!½⅓⅔¼¾²³]|[eE][-+]?\d|[ \t]*(?:\\[dt]?frac|\^|(?i:{'|'.join(MAGNITUDES)})\b|[kKM]\b|(?:squared|cubed)\b))"
    r"(?!(?:[^\w\s(]|[ \t]|\((?=(?:or|and)\b)|\\(?:times|cdot|div)|[或和]"
    r"|(?<![a-zA-Z])(?:or|and|to|x|plus|minus|times|not|maybe)(?![a-zA-Z])){1,12}\d)"
    rf"(?!{CONTINUATION}|{ALTERNATIVE}|[ \t,;$*]{{0,9}}(?:and[ \t])?[a-zA-Z][ \t]*=)"
)
_MARK = re.compile(  # with a number on its line, or at the beginning of the line after "Final Answer"
    rf"####(?=[\s:]{{0,9}}(?:[^\n#]*|{_NAMED}\s{{0,9}}(?:[^\w#]{{0,9}}(?:boxed\{{-?)?))\d)(?:(?!####).)*", re.DOTALL
)
_SIGNS = str.maketrans({"−": "-"} | dict.fromkeys("$€£¥"))
_LIST = re.compile(r",(?!\d{2,3},|\d{3}(?!\d))")  # commas that separate no thousands: "1,2" is not 12
_NUMBER = re.compile(r"[-−]?\$?[0-9][0-9.,]{0,99}|[-−]?\.[0-9]{1,99}")


def extract_answer(text: str, method: Method = "strict") -> str | None:
    """Returns the answer in `text` without thousands separators and currency signs; None if there is none.

    Raises:
        ValueError: `method` is neither "strict" nor "flexible".
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method must be 'strict' or 'flexible', not {method!r}")
    if method == "strict":  # the last mark with a number behind it is the answer, even one that cannot be read
        *_, last = ("", *_MARK.findall(text[-_TAIL:]))
        found = _MARKED.findall(last)[:1]
    else:
        found = _NUMBER.findall(text[-_FLEXIBLE_TAIL:])
    for candidate in reversed(found):
        cleaned = _clean(candidate)
        if _number(cleaned) is not None:
            return cleaned
    return None


def _references(ground_truth: Any) -> list[Decimal]:
    found = [extract_answer(truth, "strict") if "####" in truth else _clean(truth) for truth in truths_of(ground_truth)]
    numbers = [number for number in map(_number, filter(None, found)) if number is not None]
    if not numbers:
        raise DataError(
            f"reward_model.ground_truth must be a number, or end with '#### <number>', not {str(ground_truth)[:80]!r}"
        )
    return numbers


@reads_truth(_references)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Returns `score` for the right number, `format_score` for another number, 0.0 if there is no answer.

    Raises:
        DataError: there is no number in `ground_truth`.
    """
    references = _references(ground_truth)
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if _number(answer) in references else format_score


def _clean(text: str) -> str:
    bare = text.strip().translate(_SIGNS).lstrip("+").rstrip(".,")
    return bare if _LIST.search(bare) else bare.replace(",", "")


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
