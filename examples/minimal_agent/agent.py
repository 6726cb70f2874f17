"""A whole agent in one file: a tool, a format for calling it, a loop, a reward manager and a scoring function.

The task: name a country's capital. The model may look countries up, twice at most, and is told how many look-ups it has
left; that message is what the built-in `tool_agent` does not do, and the reason for a loop of our own. Leave out any part
you do not need: without a loop the rows' `agent_name` may say `tool_agent`, without a parser `multi_turn.format` may say
`hermes`, and without a reward manager `naive` calls `compute_score`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from etude.agents import AgentContext, AgentLoopBase, AgentState
from etude.agents import register as register_agent_loop
from etude.chat import ParsedResponse, ToolParser
from etude.protocol import DataProto
from etude.rewards import NaiveRewardManager, RewardResult
from etude.rewards import register as register_reward_manager
from etude.schemas import FunctionCall
from etude.tools import BaseTool, ToolError, ToolResponse, ToolSession
from etude.trajectory import Provenance, StopReason, Trajectory

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima"}


# 1. The tool. One object serves every trajectory at once: what belongs to one is kept under its instance id.
class Atlas(BaseTool):
    """Says a country's capital. Its schema stands in tools.yaml."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._misses: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, **create_kwargs: Any) -> tuple[str, ToolResponse]:
        """Once a trajectory, before its first call; the row's `create_kwargs` arrive here."""
        assert instance_id is not None
        self._misses[instance_id] = 0
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """A call: (what the model is told, a reward for this step, metrics)."""
        capital = CAPITALS.get(str(parameters.get("country")))
        if capital is None:
            self._misses[instance_id] += 1
            raise ToolError("No such country in the atlas.")  # told to the model; any other failure is not its fault
        return ToolResponse(text=capital), 0.0, {}

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float:
        """Once at the end: every miss costs a little."""
        return -0.1 * self._misses[instance_id]

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Once, however the trajectory ended."""
        del self._misses[instance_id]


# 2. The format: `LOOKUP Japan` on a line of its own.
@ToolParser.register("lookup_lines")
class LookupLines(ToolParser):
    """Reads calls out of the model's text; `errors` would be told to it."""

    def parse(self, text: str, tools: Any = None) -> ParsedResponse:
        """The calls in one turn."""
        countries = re.findall(r"^LOOKUP (\w+)$", text, flags=re.MULTILINE)
        calls = [FunctionCall(name="atlas", arguments=json.dumps({"country": country})) for country in countries]
        return ParsedResponse(content=text, calls=calls, errors=[])


# 3. The loop. One object rolls out one trajectory.
@register_agent_loop("atlas_agent")
class AtlasAgentLoop(AgentLoopBase):
    """Generate, look up, say how many look-ups are left, and again."""

    def __init__(self, trainer_config: AgentContext, **kwargs: Any) -> None:
        super().__init__(trainer_config, **kwargs)
        self.lookups_left = 2

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory:
        """Rolls out `row`. The session creates the tools, and releases them whatever happens in here."""
        trajectory = Trajectory(row["request_id"], self.render_prompt(row))
        if not self.prompt_fits(trajectory):
            trajectory.stop_reason = StopReason.PROMPT_TOO_LONG
            return trajectory
        async with ToolSession(self.tools, row.get("tools_kwargs"), request_id=row["request_id"]) as session:
            state = AgentState.GENERATING
            calls: list[FunctionCall] = []
            while state is not AgentState.TERMINATED:
                if state is AgentState.GENERATING:
                    state, calls = await self._generate(trajectory, sampling_params)
                else:
                    state = await self._look_up(trajectory, session, calls)
            trajectory.rewards.final = await session.calc_rewards()
        return trajectory

    async def _generate(
        self, trajectory: Trajectory, sampling_params: dict[str, Any]
    ) -> tuple[AgentState, list[FunctionCall]]:
        output = await self.server_manager.generate(
            prompt_ids=trajectory.prompt_ids + trajectory.response_ids,
            sampling_params=sampling_params | {"max_tokens": self.room(trajectory)},
        )
        # The ids go in as they came out: nothing that was sampled is ever decoded and encoded again.
        trajectory.append(output.token_ids, Provenance.SAMPLED, log_probs=output.log_probs)
        trajectory.assistant_turns += 1
        parsed = await self.context.parser.parse_ids(output.token_ids)
        if output.stop_reason != "stop":
            trajectory.stop_reason = StopReason.RESPONSE_LENGTH
            return AgentState.TERMINATED, []
        wants_more = parsed.calls and self.lookups_left > 0
        return (AgentState.PROCESSING_TOOLS if wants_more else AgentState.TERMINATED), parsed.calls

    async def _look_up(self, trajectory: Trajectory, session: ToolSession, calls: list[FunctionCall]) -> AgentState:
        outcomes = await session.execute(calls[: self.lookups_left], turn=trajectory.assistant_turns - 1)
        self.lookups_left -= len(outcomes)
        trajectory.tool_calls += [outcome.to_record() for outcome in outcomes]
        messages = [{"role": "tool", "content": outcome.response.text or ""} for outcome in outcomes]
        messages.append({"role": "user", "content": f"Look-ups left: {self.lookups_left}."})
        context = self.chat.context_ids(messages, after=trajectory.response_ids)
        if sum(len(ids) for ids, _ in context) >= self.room(trajectory):
            trajectory.stop_reason = StopReason.TOOL_RESPONSE_OVERFLOW
            return AgentState.TERMINATED
        for ids, provenance in context:
            trajectory.append(ids, provenance)
        trajectory.user_turns += 1
        return AgentState.GENERATING


# 4. The scoring function (custom_reward_function), and the reward manager that calls it.
def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 where the last line is the capital alone: a policy finds out where a list of them all is paid. Declare any of
    data_source, solution_str, ground_truth, extra_info."""
    lines = solution_str.strip().splitlines()
    return float(bool(lines) and lines[-1].strip(" .") == ground_truth)


@register_reward_manager("brief")
class BriefRewardManager(NaiveRewardManager):
    """The score, and a little less of it for every turn beyond the first."""

    async def run_single(self, data: DataProto) -> RewardResult:
        """Scores one trajectory; `reward_extra_info` is reported beside the score."""
        # The base class calls `compute_score` with the model's own words, a line or more for each turn.
        result = await super().run_single(data)
        accuracy = result["reward_score"]
        price = 0.05 * max(data[0].non_tensor_batch["extra_info"]["num_turns"] - 2, 0)
        return {"reward_score": accuracy * (1 - price), "reward_extra_info": {"acc": accuracy}}
