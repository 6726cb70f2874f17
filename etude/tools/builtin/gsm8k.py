"""`Gsm8kTool`: tells the model whether its answer to a grade-school problem is right, and scores the last answer given.

Invariant: an instance knows its reference answer from `create` on; a trajectory without one is an error, not a wrong
answer. How answers are compared is `etude.rewards.gsm8k`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from etude.errors import DataError
from etude.rewards import gsm8k
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.tools.base import BaseTool
from etude.trace import rollout_trace_op

NO_PROGRESS_REWARD = -0.05  # step reward of a call that does not better the last answer
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": "Checks an answer to the problem: reward 1.0 if it is correct, 0.0 if it is not.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "Your answer to the problem, a number"}},
            "required": ["answer"],
        },
    },
}


@dataclass
class _State:
    ground_truth: str
    response: str = ""
    reward: float = 0.0


class Gsm8kTool(BaseTool):
    """`create_kwargs`: `ground_truth`, the reference answer (required)."""

    name = "calc_gsm8k_reward"

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, _State] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The configured schema, else the tool's own."""
        return self.tool_schema or OpenAIFunctionToolSchema.model_validate(_SCHEMA)

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **create_kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Keeps the reference answer.

        Raises:
            DataError: the row has none for this tool.
        """
        if ground_truth is None:
            raise DataError(f"tools_kwargs.{self.name}.create_kwargs.ground_truth is missing")
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = _State(str(ground_truth))
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Judges `parameters["answer"]`; step reward 0.0 if it betters the last answer, else -0.05."""
        state = self._instance_dict[instance_id]
        answer = str(parameters.get("answer", ""))
        state.response = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        step_reward = 0.0 if reward > state.reward else NO_PROGRESS_REWARD
        state.reward = reward
        return ToolResponse(text=f"Current parsed answer={state.response!r} reward={reward}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float:
        """1.0 if the last answer given is the reference answer, else 0.0."""
        state = self._instance_dict[instance_id]
        return gsm8k.compute_score(state.response, state.ground_truth, method="flexible")

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Forgets the trajectory."""
        self._instance_dict.pop(instance_id, None)
