r"""Scoring of geometry problems (Geometry3K): the answer, compared as mathematics, and the format of the solution.

The format is right if the solution begins with `<think>`, which may be the prompt's, reasons, closes it, and gives a
`\boxed{…}` after it.
"""

from __future__ import annotations

from typing import Any

from etude.rewards.answers import is_answer, references_of
from etude.rewards.boxed import last_boxed
from etude.rewards.truth import reads_truth
from etude.rewards.view import with_opening


@reads_truth(references_of)
def compute_score(
    solution_str: str, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1, trajectory: Any = None
) -> float:
    r"""Returns (1 - `format_score`) for the right answer plus `format_score` for the right format.

    The answer is the last `\boxed{…}`, or, without `use_boxed`, the whole of `solution_str`.

    Raises as `is_answer`.
    """
    answer = last_boxed(solution_str) if use_boxed else solution_str
    written = with_opening(solution_str, trajectory, "think")
    return (1.0 - format_score) * is_answer(answer, ground_truth, trajectory) + format_score * has_form(written)


def has_form(solution: str) -> bool:
    """Whether `solution` begins with a closed `<think>` block that is not blank and then boxes an answer."""
    thought, closing, rest = solution.partition("</think>")
    _, box, boxed = rest.partition("\\boxed{")
    reasons = thought.startswith("<think>") and thought.replace("<think>", "").strip()
    return bool(reasons and closing and box and "}" in boxed)
