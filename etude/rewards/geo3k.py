r"""Scoring of geometry problems (Geometry3K): the answer, compared as mathematics, and the format of the solution.

The format is right if the solution begins with `<think>`, closes it, and gives a `\boxed{…}` after it.
"""

from __future__ import annotations

from typing import Any

from etude.rewards.answers import is_answer, references_of
from etude.rewards.boxed import last_boxed
from etude.rewards.truth import reads_truth

_FORM = ("</think>", "\\boxed{", "}")


@reads_truth(references_of)
def compute_score(
    solution_str: str, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1, trajectory: Any = None
) -> float:
    r"""Returns (1 - `format_score`) for the right answer plus `format_score` for the right format.

    The answer is the last `\boxed{…}`, or, without `use_boxed`, the whole of `solution_str`.

    Raises as `is_answer`.
    """
    answer = last_boxed(solution_str) if use_boxed else solution_str
    return (1.0 - format_score) * is_answer(answer, ground_truth, trajectory) + format_score * has_form(solution_str)


def has_form(solution: str) -> bool:
    """Whether `solution` begins with a closed `<think>` block and then boxes an answer."""
    position = len("<think>") if solution.startswith("<think>") else -1
    for piece in _FORM:
        if position < 0:
            return False
        found = solution.find(piece, position)
        position = found + len(piece) if found >= 0 else -1
    return position >= 0
