"""`Geo3kTool`: returns the score of the model's answer to a geometry problem; the last answer's score is the final reward.

Answers are compared as mathematics by `etude.rewards.answers`, in a thread: symbolic algebra may use its whole time limit.
"""

from __future__ import annotations

from etude.rewards.answers import is_answer
from etude.rewards.boxed import last_boxed
from etude.timeouts import BlockingCalls
from etude.tools.builtin.answer import AnswerTool, answer_schema

_algebra = BlockingCalls("etude-geo3k", limit=8)


class Geo3kTool(AnswerTool):
    r"""`create_kwargs`: `ground_truth`, the reference answer (required). The model's answer may be in a `\boxed{…}`."""

    name = "calc_geo3k_reward"
    schema = answer_schema(
        name,
        "Checks an answer to the geometry problem: reward 1.0 if it is correct, 0.0 if it is not.",
        "Your answer to the problem, a number or an expression in LaTeX",
    )

    async def judge(self, response: str, ground_truth: str) -> float:
        """Returns 1.0 for an answer that equals the reference, else 0.0."""
        answer = last_boxed(response) or response
        return float(await _algebra.run(is_answer, answer, ground_truth))
