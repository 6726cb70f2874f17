"""`Gsm8kTool`: returns the score of the model's answer to a GSM8K problem; the last answer's score is the final reward.

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
        """Returns the answer after `####`, as at the end of a solution."""
        return answer if answer.startswith("#### ") else f"#### {answer}"

    async def judge(self, response: str, ground_truth: str) -> float:
        """Returns 1.0 for the reference number, else 0.0."""
        return gsm8k.compute_score(response, ground_truth, method="flexible")
