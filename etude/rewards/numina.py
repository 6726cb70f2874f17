r"""Scoring of NuminaMath problems: the last boxed answer, else the last stated one ("the answer is …").

verl scores these sources with PRIME's `prime_math`. Text inside `<think>` does not count.
"""

from __future__ import annotations

import re
from typing import Any

from etude.rewards.answers import is_answer, references_of
from etude.rewards.boxed import last_boxed
from etude.rewards.truth import reads_truth

_CLOSING = re.compile(  # how Minerva's prompt has answers end, and proofs
    r"\s*(?:I hope it is correct\.?|\$?\s*\\(?:blacksquare|qed|square|Box)(?![a-z])\s*\$?)\s*\Z"
)
TAIL = 2000  # characters searched for a stated answer, from a solution's end
_DISPLAY = r"[\s\S]{1,500}?(?:\\\]|\$\$)"
_STATED = re.compile(
    r"\banswer\b[*_]{0,3}(?:\s+is|\s*:)\s*:?[\s*_]{0,9}(?:the\s(?:final\s)?answer\sis:?\s)?"
    rf"((?:\\\[|\$\$)[ \t]*\n{_DISPLAY}(?:\s*(?:or|and)\s*(?:\\\[|\$\$){_DISPLAY})*|[^\n]+)",
    re.IGNORECASE,
)


def extract_answer(text: str) -> str | None:
    """Returns the answer in `text`; None if it gives none."""
    text = text.rpartition("</think>")[2]
    boxed = last_boxed(text)
    if boxed is not None or "\\boxed" in text:  # an unfinished box is no answer, nor is the text before it
        return boxed
    stated = _STATED.findall(text[-TAIL:])
    return _CLOSING.sub("", stated[-1]).strip().rstrip(".").strip("*_` ") if stated else None


@reads_truth(references_of)
def compute_score(solution_str: str, ground_truth: Any, trajectory: Any = None) -> dict[str, Any]:
    """Returns `score` and `acc` (1.0 if the answer equals `ground_truth` as mathematics, else 0.0), and `pred`, the answer;
    raises as `is_answer`."""
    answer = extract_answer(solution_str)
    right = float(is_answer(answer, ground_truth, trajectory))
    return {"score": right, "acc": right, "pred": answer}
