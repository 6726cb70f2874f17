"""`Gsm8kTool`: tells the model whether its answer to a grade-school problem is right, and scores the last answer given.

Comparing answers is left to `etude.rewards.gsm8k`.
"""

from __future__ import annotations

from etude.rewards import gsm8k
from etude.tools.builtin.answer import AnswerTool, answer_schema


class Gsm8kTool(AnswerTool):
    """`create_kwargs`: `ground_truth`, the reference answer (required)."""

    name = "calc_gsm8k_reward"
    schema = answer_schema(
        name,
        "Checks an answer to the problem: reward 1.0 if it is correct, 0.0 if it is not.",
        "Your answer to the problem, a number",
    )

    def as_response(self, answer: str) -> str:
        """The answer after `####`, as solutions end."""
        return answer if answer.startswith("#### ") else f"#### {answer}"

    async def judge(self, response: str, ground_truth: str) -> float:
        """1.0 for the reference number, else 0.0."""
        return gsm8k.compute_score(response, ground_truth, method="flexible")
