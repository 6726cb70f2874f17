"""Scoring of mathematics: the last boxed answer of a solution against the reference, as mathematics (see `answers.py`)."""

from __future__ import annotations

import re
from typing import Any

from etude.errors import DataError
from etude.rewards.answers import answers_equal, is_answer, references_of
from etude.rewards.boxed import last_boxed
from etude.rewards.truth import reads_truth, require_truth

__all__ = ["answers_equal", "compute_score", "integer_score", "last_boxed"]

_LOOK = re.compile(r"\\[,!;]|\$")
_INTEGER = re.compile(r"[+-]? ?(?:[0-9]{1,200}|[0-9]{1,3}(?:[, ][0-9]{3}){1,60})")


@reads_truth(references_of)
def compute_score(solution_str: str, ground_truth: Any, trajectory: Any = None) -> float:
    """Returns 1.0 if the last boxed answer equals `ground_truth`, else 0.0; raises as `is_answer`."""
    return float(is_answer(last_boxed(solution_str), ground_truth, trajectory))


def _integer(ground_truth: Any) -> int:
    try:
        return int(require_truth(ground_truth))
    except (TypeError, ValueError) as error:
        raise DataError(f"reward_model.ground_truth must be an integer, not {str(ground_truth)[:80]!r}") from error


@reads_truth(_integer)
def integer_score(solution_str: str, ground_truth: Any) -> float:
    """Returns 1.0 if the last boxed answer is exactly the integer `ground_truth`, else 0.0.

    Raises:
        DataError: `ground_truth` is not an integer.
    """
    truth = _integer(ground_truth)
    answer = _LOOK.sub("", last_boxed(solution_str) or "").replace("{,}", ",").replace("−", "-").strip()
    return float(bool(_INTEGER.fullmatch(answer)) and int(re.sub("[, ]", "", answer)) == truth)
