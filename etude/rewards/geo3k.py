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
    r"""Returns (1 - `format_score`) for the right answer plus `format_score` for the right format: verl's function, as tools
    of users call it.

    The answer is the last `\boxed{…}`, or, without `use_boxed`, the whole of `solution_str`.

    Raises as `is_answer`.
    """
    return float(grade(solution_str, ground_truth, use_boxed, format_score, trajectory)["score"])


@reads_truth(references_of)
def grade(
    solution_str: str, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1, trajectory: Any = None
) -> dict[str, Any]:
    """Returns `score` (`compute_score`), `acc` (1.0 for the right answer, whatever its format, else 0.0), and `pred`, the
    answer. Raises as `is_answer`."""
    answer = last_boxed(solution_str) if use_boxed else solution_str
    right = is_answer(answer, ground_truth, trajectory)
    formed = has_form(with_opening(solution_str, trajectory, "think"))
    score = (1.0 - format_score) * right + format_score * formed
    return {"score": score, "acc": float(right), "pred": answer}


def has_form(solution: str) -> bool:
    """Whether `solution` begins with a closed `<think>` block that is not blank and then boxes an answer."""
    thought, closing, rest = solution.partition("</think>")
    _, box, boxed = rest.partition("\\boxed{")
    reasons = thought.startswith("<think>") and thought.replace("<think>", "").strip()
    return bool(reasons and closing and box and "}" in boxed)
