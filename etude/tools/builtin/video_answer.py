"""`VideoAnswerTool`: tells the model whether its answer to a question on a video is right, and scores the last one given.

Comparing answers is left to `etude.rewards.choice`.
"""

from __future__ import annotations

from etude.rewards import choice
from etude.tools.builtin.answer import AnswerTool, answer_schema


class VideoAnswerTool(AnswerTool):
    """`create_kwargs`: `ground_truth`, the letter of the right option, or the answer as text (required)."""

    name = "calc_video_reward"
    schema = answer_schema(
        name,
        "Checks an answer to the question: reward 1.0 if it is correct, 0.0 if it is not.",
        "Your answer: the letter of the option",
    )

    async def judge(self, response: str, ground_truth: str) -> float:
        """1.0 for the reference choice, else 0.0."""
        return choice.compute_score(response, ground_truth)
