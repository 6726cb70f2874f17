"""`AnswerTool`: a tool that scores the model's answer against a reference, in any number of turns.

Invariant: `create` stores the reference; a trajectory without one is an error, not a wrong answer. Several calls in one turn
are scored in the order in which the model wrote them, so that rewards do not depend on timing. Comparing answers is left to
subclasses.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from etude.errors import DataError, ToolError
from etude.rewards.truth import is_missing
from etude.schemas import ToolResponse
from etude.tools.base import Execution, StatefulTool, function_schema
from etude.trace import rollout_trace_op

NO_PROGRESS_REWARD = -0.05  # step reward of a call that does not improve on the last answer
MAX_ANSWER_CHARS = 2000


@dataclass
class AnswerState:
    """The state of one trajectory: the reference, the last answer and its score."""

    ground_truth: str
    response: str = ""
    reward: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class AnswerTool(StatefulTool[AnswerState]):
    """`create_kwargs`: `ground_truth`, the reference answer (required). A subclass defines `name`, `schema` and `judge`."""

    def as_response(self, answer: str) -> str:
        """Returns the normalized form of an answer."""
        return answer

    async def judge(self, response: str, ground_truth: str) -> float:
        """Returns the score of `response`, from 0.0 to 1.0."""
        raise NotImplementedError

    async def begin(self, ground_truth: str | None = None, **create_kwargs: Any) -> AnswerState:
        """Stores the reference answer.

        Raises:
            DataError: the row has no `ground_truth` for this tool.
        """
        if is_missing(ground_truth):
            raise DataError(f"tools_kwargs.{self.name}.create_kwargs.ground_truth is missing")
        return AnswerState(str(ground_truth))

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> Execution:
        """Scores `parameters["answer"]`; the step reward is 0.0 if the score is better than the last answer's, else -0.05.

        Raises:
            ToolError: the answer is too long.
        """
        state = self._instance_dict[instance_id]
        answer = str(parameters.get("answer", ""))
        if len(answer) > MAX_ANSWER_CHARS:
            raise ToolError(f"Error: the answer is longer than {MAX_ANSWER_CHARS} characters; give the result alone")
        async with state.turn:
            state.response = self.as_response(answer)
            reward = await self.judge(state.response, state.ground_truth)
            step_reward = 0.0 if reward > state.reward else NO_PROGRESS_REWARD
            state.reward = reward
            return ToolResponse(text=f"Current parsed answer={state.response!r} reward={reward}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float:
        """Returns the score of the last answer; 0.0 if there is none."""
        return self._instance_dict[instance_id].reward


def answer_schema(name: str, description: str, answer: str) -> dict[str, Any]:
    """Returns the schema of a function with one string argument `answer`, whose description is `answer`."""
    return function_schema(name, description, ["answer"], answer={"type": "string", "description": answer})
