"""`single_turn_agent`: one prompt, one response, no tools."""

from __future__ import annotations

from typing import Any

from etude.agents.base import AgentLoopBase, register
from etude.inference import SamplingParams
from etude.trajectory import StopReason, Trajectory


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Samples one response per prompt."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        """See `AgentLoopBase.run`."""
        messages = list(row["raw_prompt"])
        images = await self.read_images(row)
        prompt_ids = self.render_prompt(row, messages, [], images)
        trajectory = Trajectory(row["request_id"], prompt_ids, messages=messages, images=images)
        if not self.prompt_fits(trajectory):
            trajectory.stop_reason = StopReason.PROMPT_TOO_LONG
            return trajectory
        sampling, budget = SamplingParams.of(sampling_params), self.turn_budget(trajectory)
        _, cut_by = await self.server_manager.sample_turn(trajectory, sampling, budget, self.chat.decode)
        trajectory.stop_reason = cut_by or trajectory.stop_reason
        return trajectory
