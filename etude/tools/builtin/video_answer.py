"""`VideoAnswerTool`: returns the score of the model's answer to a question on a video; the last score is the final reward.

Comparing answers is left to `etude.rewards.choice`.
"""

from __future__ import annotations

from etude.rewards import choice
from etude.tools.builtin.answer import AnswerTool, answer_schema


class VideoAnswerTool(AnswerTool):
    """`create_kwargs`: `ground_truth` (required), the letter of the correct option, or the answer as text."""

    name = "calc_video_reward"
    schema = answer_schema(
        name,
        "Checks an answer to the question: reward 1.0 if it is correct, 0.0 if it is not.",
        "Your answer: the letter of the option",
    )

    async def judge(self, response: str, ground_truth: str) -> float:
        """Returns 1.0 for the reference choice, else 0.0."""
        return choice.compute_score(response, ground_truth)
