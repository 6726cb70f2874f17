r"""Scoring of mathematics as in DAPO: the last line `Answer: …` of a solution against the reference.

Source: DAPO (arXiv:2503.14476), whose data asks for "Answer: $Answer" on the last line. A right answer scores +1 and a
wrong one -1, as in the paper; `acc` is 1 or 0, and `pred` is the parsed answer.
"""

from __future__ import annotations

import re
from typing import Any

from etude.rewards.answers import is_answer, references_of
from etude.rewards.boxed import last_boxed
from etude.rewards.truth import reads_truth

TAIL = 300
"""Characters that are searched, from the end of a solution: an earlier `Answer:` is not the final one."""
_ANSWER = re.compile(r"(?:answer|答案)\*{0,2}\s{0,9}[:：](?=[\s*]{0,20}[^\s*])", re.IGNORECASE)
_OPENING = {r"\[", r"\(", "$$"}


def extract_answer(text: str, strict_box: bool = False) -> str | None:
    r"""Returns what follows the last `Answer:` on its line, or else the next line, or the box in it; with `strict_box`,
    the last box."""
    tail = text[-TAIL:]
    if strict_box:
        return last_boxed(tail)
    *before, rest = _ANSWER.split(tail)
    if not before:
        return None
    lines = (line.strip(" \t*`") for line in rest.splitlines())
    line = next((line for line in lines if line and line not in _OPENING), "")
    return last_boxed(line) or line


@reads_truth(references_of)
def compute_score(
    solution_str: str, ground_truth: Any, strict_box: bool = False, trajectory: Any = None
) -> dict[str, Any]:
    """Returns `score` (1.0 or -1.0), `acc` (1.0 or 0.0) and `pred` (the answer; None if there is none).; raises as
    `is_answer`."""
    answer = extract_answer(solution_str, strict_box)
    right = is_answer(answer, ground_truth, trajectory)
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer}
