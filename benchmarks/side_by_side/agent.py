"""What a user of Étude would write for this task: the calculator, its score, and an agent loop whose turns are capped.

Loaded by Étude itself, through the keys `plugins`, `function_tool_path` and `custom_reward_function.path`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from etude.agents import SingleTurnAgentLoop, ToolAgentLoop, register
from etude.errors import ToolError
from etude.tools import function_tool
from etude.trajectory import Trajectory
from side_by_side import etude_run, task

TURN_TOKENS = int(os.environ.get("BENCHMARK_TURN_TOKENS", "96"))


@function_tool(schema=task.SCHEMA)
async def calculator(expression: str) -> str:
    """Evaluate one arithmetic expression, after the time that the benchmark asks for."""
    seconds, fails = etude_run.latency.draw(expression)
    if seconds:
        await asyncio.sleep(seconds)
    if fails:
        raise ToolError("the calculator is busy: try again")
    try:
        return task.calculate(expression)
    except ValueError as error:
        raise ToolError(str(error)) from error


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """See `task.score`."""
    return task.score(solution_str.rsplit("\n", 1)[-1], extra_info["num_turns"] > 2, ground_truth)


@register("endless_agent")
class EndlessAgentLoop(SingleTurnAgentLoop):
    """Samples one turn of exactly `TURN_TOKENS` tokens: no stop token ends it earlier."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        """See `AgentLoopBase.run`."""
        return await super().run({**sampling_params, "max_tokens": TURN_TOKENS, "stop_token_ids": ()}, **row)


@register("capped_tool_agent")
class CappedToolAgentLoop(ToolAgentLoop):
    """The built-in loop with a limit of `TURN_TOKENS` per turn, as in the peers."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        """See `AgentLoopBase.run`."""
        return await super().run({**sampling_params, "max_tokens": TURN_TOKENS}, **row)
