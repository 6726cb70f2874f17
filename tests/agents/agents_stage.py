"""The stage of the agents' tests: a real tiny tokenizer, its template and parser, scripted turns, recording tools."""

import asyncio
import json
from collections import Counter

from etude.agents import (
    AgentContext,
    AgentLoopBase,
    AgentLoopManager,
    MultiTurnOptions,
    RolloutOptions,
    Sampling,
    ToolAgentLoop,
    TrajectoryClient,
)
from etude.agents.validation import check_sampled, validate_output
from etude.chat import ChatTemplate, HermesToolParser
from etude.inference import ScriptedEngine, TokenOutput
from etude.models import build_tiny_tokenizer
from etude.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from etude.trajectory import Provenance, Trajectory

TEXTS = ["What is 2 + 3? The answer is 5. tool call name arguments text value", '{"name": "echo", "arguments": {}}'] * 4
TOKENIZER = build_tiny_tokenizer(TEXTS, 400)
CHAT = ChatTemplate(TOKENIZER)
SAMPLING = Sampling(1.0, 1.0, -1, seed=7)
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}]


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def says(text):
    """The ids of a turn that ends of its own accord."""
    return [*encode(text), CHAT.end_of_turn_id]


def call(name="echo", **arguments):
    """The text of a tool call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def schema(name):
    return OpenAIFunctionToolSchema.model_validate(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "Repeats a text.",
                "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
            },
        }
    )


class Echo(BaseTool):
    """Repeats its text; `log` counts what happened to it, the constructor's keywords make it act up."""

    def __init__(self, name="echo", *, reward=0.0, final=0.0, greeting=None, respond=None, **config):
        super().__init__(config, schema(name))
        self.reward, self.final, self.greeting, self.respond = reward, final, greeting, respond
        self.log = Counter()
        self.events = []

    def note(self, event, instance_id):
        self.log[event] += 1
        self.events.append((event, instance_id))

    async def create(self, instance_id=None, **kwargs):
        self.note("create", instance_id)
        return instance_id, ToolResponse(text=self.greeting)

    async def execute(self, instance_id, parameters, **kwargs):
        self.note("execute", instance_id)
        answer = self.respond(parameters) if self.respond else parameters.get("text", "")
        return answer if isinstance(answer, ToolResponse) else ToolResponse(text=answer), self.reward, {}

    async def calc_reward(self, instance_id, **kwargs):
        self.note("calc_reward", instance_id)
        return self.final

    async def release(self, instance_id, **kwargs):
        self.note("release", instance_id)


def options(*, multi_turn=None, **given):
    return RolloutOptions(multi_turn=MultiTurnOptions(**(multi_turn or {})), **given)


def context(tools=(), config=None, interactions=(), environment=None, parser=None, scored=True, **given):
    return AgentContext(
        config=config,
        options=options(**given),
        tokenizer=TOKENIZER,
        chat=CHAT,
        parser=parser or HermesToolParser(TOKENIZER),
        tools={tool.name: tool for tool in tools},
        interactions={each.name: each for each in interactions},
        environment=environment,
        scored=scored,
    )


class Recorder(ScriptedEngine):
    """A scripted engine that remembers every request: (request id, prompt ids, sampling parameters)."""

    def __init__(self, script, latency=0.0):
        turns = script if callable(script) else (lambda request_id, prompt, turn: script[turn])
        super().__init__(turns, latency)
        self.asked = []

    async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
        self.asked.append((request_id, list(prompt_ids), sampling_params))
        return await super().generate(request_id, prompt_ids, sampling_params, images=images)


def roll(script, tools=(), *, row=None, loop_class=ToolAgentLoop, **given):
    """(trajectory, engine) of one scripted run of an agent loop."""
    engine = Recorder(script)
    shared = context(tools, **given)
    row = {"raw_prompt": QUESTION, "request_id": "r", "group_seed": 7} | (row or {})

    async def main():
        client = TrajectoryClient(engine, "r")
        loop = loop_class(trainer_config=shared, server_manager=client, tokenizer=TOKENIZER, processor=None)
        params = SAMPLING.params(0, shared.options.response_length, CHAT.stop_token_ids)
        return validate_output(await loop.run(params, **row), client, "own", shared.options.response_length)[-1]

    return asyncio.run(main()), engine


def run(name=None, rows=1, script=None, tools=(), *, engine=None, scorer=None, row=None, **given):
    """(results, engine) of a manager that rolls `rows` rows out with the agent loop `name`; `row` has more columns."""
    engine = engine or Recorder(script or [says("The answer is 5.")])
    manager = AgentLoopManager(context(tools, **given), engine, scorer)
    same = {"raw_prompt": QUESTION, "agent_name": name} | (row or {})
    made = [{"uid": f"u{n}", "rollout_index": n} | same for n in range(rows)]
    results = asyncio.run(asyncio.wait_for(manager.generate(made, SAMPLING), 120))
    if isinstance(engine, ScriptedEngine):
        assert Counter(engine.opened) == Counter(engine.closed)
    return results, engine


def check(client, *outputs):
    """The draws that outputs or trajectories hold; refuses what the client's engine did not draw."""
    sequences = [each if isinstance(each, Trajectory) else each.to_trajectory(client.request_id) for each in outputs]
    return check_sampled(sequences, client)


class Drawn(Recorder):
    """Draws with log-probs that tell the token and the place."""

    async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
        output = await super().generate(request_id, prompt_ids, sampling_params)
        values = [-(1 + token / 7 + place / 1000) for place, token in enumerate(output.token_ids)]
        return TokenOutput(output.token_ids, values, output.stop_reason)


def loop_that_returns(made):
    """A loop of two turns, whose prompt, ids, mask and log-probs `made` turns into an output."""

    class Own(AgentLoopBase):
        async def run(self, sampling_params, **row):
            prompt = self.chat.initial_ids(row["raw_prompt"])
            trajectory = Trajectory(row["request_id"], prompt)
            for turn in range(2):
                drawn = await self.server_manager.generate(
                    prompt_ids=trajectory.context_ids(), sampling_params=sampling_params
                )
                trajectory.append(drawn.token_ids, Provenance.SAMPLED, log_probs=drawn.log_probs)
                trajectory.assistant_turns += 1
                if turn == 0:
                    trajectory.append([5, 6], Provenance.TOOL)
            return made(trajectory)

    return Own
