"""`single_turn_agent`: one prompt, one answer, no tools."""

from __future__ import annotations

import time
from typing import Any

from etude.agents.base import AgentLoopBase, register
from etude.inference import SamplingParams
from etude.trajectory import Provenance, StopReason, Trajectory


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Samples once."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        """See `AgentLoopBase.run`."""
        messages = list(row["raw_prompt"])
        images = await self.read_images(row)
        prompt_ids = self.render_prompt(row, messages, images=images)
        trajectory = Trajectory(row["request_id"], prompt_ids, messages=messages, images=images)
        if not self.prompt_fits(trajectory):
            trajectory.stop_reason = StopReason.PROMPT_TOO_LONG
            return trajectory
        started = time.perf_counter()
        most, reason = self.turn_budget(trajectory)
        output = await self.server_manager.generate(
            prompt_ids=prompt_ids,
            sampling_params=SamplingParams.of(sampling_params).within(most),
            images=tuple(images) or None,
        )
        trajectory.add_time("generate_sequences", time.perf_counter() - started)
        trajectory.append(
            output.token_ids, Provenance.SAMPLED, log_probs=output.log_probs, weight_versions=output.weight_versions
        )
        trajectory.assistant_turns = 1
        if output.stop_reason != "stop":
            trajectory.stop_reason = reason if len(output.token_ids) >= most else StopReason.CONTEXT_LENGTH
        trajectory.messages = [*messages, {"role": "assistant", "content": self.chat.decode(output.token_ids)}]
        return trajectory
