"""An agent written as the reading of verl's source (its section 06) tells users to, with only the imports renamed."""

import json
import re
from typing import Any

from etude.agents import AgentData, AgentLoopBase, AgentLoopOutput, AgentState, register
from etude.chat import FunctionCall, HermesToolParser, ToolParser
from etude.rewards import AbstractRewardManager, RewardManagerBase
from etude.rewards import register as register_manager
from etude.tools import BaseTool, ToolResponse, initialize_tools_from_config, rollout_trace_op


def web_search(query: str, num_results: int = 10) -> str:
    return json.dumps([{"title": "Tomatoes and eggs", "content": f"About {query}"}] * num_results)


class MyWebSearchTool(BaseTool):
    live: dict[str, int] = {}  # noqa: RUF012  (shared on purpose: the tests look at it)

    def __init__(self, config: dict, tool_schema):
        super().__init__(config, tool_schema)
        self.num_results = config["num_results"]

    def get_openai_tool_schema(self):
        return self.tool_schema

    async def create(self, instance_id=None, **kwargs):
        self.live[instance_id] = 0
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        self.live[instance_id] += 1
        return ToolResponse(text=web_search(parameters["query"], self.num_results)), 0.0, {}

    async def calc_reward(self, instance_id, **kwargs):
        return 0.0

    async def release(self, instance_id, **kwargs):
        del self.live[instance_id]


@ToolParser.register("my_model_toolparser")
class MyModelToolParser(ToolParser):
    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer)
        self.tool_call_regex = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
        self.opening = tokenizer.encode("<tool_call>", add_special_tokens=False)

    async def extract_tool_calls(self, responses_ids: list[int]) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids)
        function_calls = []
        for match in self.tool_call_regex.findall(text):
            try:
                function_call = json.loads(match)
                name, arguments = function_call["name"], function_call["arguments"]
                function_calls.append(FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
            except Exception:
                continue
        content = self.tool_call_regex.sub("", text)
        return content, function_calls


@register("my_tool_agent")
class MyToolAgentLoop(AgentLoopBase):
    def __init__(self, trainer_config, server_manager, tokenizer, processor, **kwargs):
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)
        config = trainer_config.config
        self.max_user_turns = config.actor_rollout_ref.rollout.multi_turn.max_user_turns
        self.max_assistant_turns = config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns
        self.max_parallel_calls = config.actor_rollout_ref.rollout.multi_turn.max_parallel_calls
        self.max_tool_response_length = config.actor_rollout_ref.rollout.multi_turn.max_tool_response_length
        self.tool_response_truncate_side = config.actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side
        tool_config_path = config.actor_rollout_ref.rollout.multi_turn.tool_config_path
        tool_list = initialize_tools_from_config(tool_config_path) if tool_config_path else []
        self.tools = {tool.name: tool for tool in tool_list}
        self.tool_schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tool_list]
        self.tool_parser = ToolParser.get_tool_parser(
            config.actor_rollout_ref.rollout.multi_turn.format, self.tokenizer
        )
        assert isinstance(HermesToolParser(self.tokenizer), ToolParser)
        self.prompt_length = config.actor_rollout_ref.rollout.prompt_length
        self.response_length = config.actor_rollout_ref.rollout.response_length

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        agent_data = AgentData(
            messages=list(kwargs["raw_prompt"]),
            image_data=None,
            metrics={},
            request_id="of-my-own-making",
            tools_kwargs=kwargs.get("tools_kwargs", {}),
        )
        state = AgentState.PENDING
        while state != AgentState.TERMINATED:
            if state == AgentState.PENDING:
                state = await self._handle_pending_state(agent_data, sampling_params)
            elif state == AgentState.GENERATING:
                state = await self._handle_generating_state(agent_data, sampling_params)
            elif state == AgentState.PROCESSING_TOOLS:
                state = await self._handle_processing_tools_state(agent_data)
        length = len(agent_data.response_mask)
        return AgentLoopOutput(
            prompt_ids=agent_data.prompt_ids[:-length],
            response_ids=agent_data.prompt_ids[-length:][: self.response_length],
            response_mask=agent_data.response_mask[: self.response_length],
            num_turns=agent_data.user_turns + agent_data.assistant_turns + 1,
            metrics=agent_data.metrics,
        )

    async def _handle_pending_state(self, agent_data, sampling_params):
        agent_data.prompt_ids = await self.loop.run_in_executor(
            None, lambda: self.chat.initial_ids(agent_data.messages, self.tool_schemas)
        )
        return AgentState.GENERATING

    async def _handle_generating_state(self, agent_data, sampling_params):
        output = await self.server_manager.generate(
            request_id=agent_data.request_id,
            prompt_ids=agent_data.prompt_ids,
            sampling_params=sampling_params,
            image_data=agent_data.image_data,
        )
        agent_data.assistant_turns += 1
        agent_data.response_ids = output.token_ids
        agent_data.prompt_ids += agent_data.response_ids
        agent_data.response_mask += [1] * len(agent_data.response_ids)
        if len(agent_data.response_mask) >= self.response_length:
            return AgentState.TERMINATED
        _, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(agent_data.response_ids)
        return AgentState.PROCESSING_TOOLS if agent_data.tool_calls else AgentState.TERMINATED

    async def _handle_processing_tools_state(self, agent_data):
        messages = []
        for tool_call in agent_data.tool_calls[: self.max_parallel_calls]:
            tool = self.tools[tool_call.name]
            instance_id, _ = await tool.create(f"{agent_data.request_id}{id(agent_data)}")
            response, reward, _ = await tool.execute(instance_id, json.loads(tool_call.arguments))
            await tool.release(instance_id)
            agent_data.tool_rewards.append(reward)
            messages.append({"role": "tool", "content": response.text[: self.max_tool_response_length]})
        for ids, _ in self.chat.context_ids(messages):
            agent_data.prompt_ids += ids
            agent_data.response_mask += [0] * len(ids)
        agent_data.user_turns += 1
        return AgentState.GENERATING


@register_manager("my_reward_manager")
class MyWebSearchRewardManager(RewardManagerBase):
    async def run_single(self, data) -> dict:
        assert len(data) == 1, "Only support single data item"
        data_item = data[0]
        data_source = data_item.non_tensor_batch["data_source"]
        ground_truth = data_item.non_tensor_batch["reward_model"]["ground_truth"]
        extra_info = data_item.non_tensor_batch.get("extra_info", {})
        response_ids = data_item.batch["responses"]
        response_str = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.decode(response_ids, skip_special_tokens=True)
        )
        score = await self.compute_score(
            data_source=data_source, solution_str=response_str, ground_truth=ground_truth, extra_info=extra_info
        )
        return {"reward_score": score, "reward_extra_info": {"acc": score, "turns": extra_info["num_turns"]}}


@register_manager("my_batch_manager")
class MyBatchManager(AbstractRewardManager):
    def __init__(self, tokenizer, compute_score, **kwargs):
        self.compute_score = compute_score

    def __call__(self, data, return_dict=False):
        rewards = data.batch["response_mask"].float()
        return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards


def compute_score(data_source, solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    return score if ground_truth["target"][0] in solution_str else format_score
