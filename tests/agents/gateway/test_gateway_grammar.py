"""Forced calls and JSON outputs through the gateway, over the real engine with a random model, with the real clients."""

import asyncio
import json
from typing import Literal

import openai
import pydantic
import pytest
import torch
from agents_stage import TOKENIZER
from gateway_stage import ECHO, SPEC, USER, native, talk

from etude.agents.batch import to_batch
from etude.agents.gateway import SessionRules
from etude.agents.validation import validate_output
from etude.chat import ToolParser
from etude.dumps import sequence_record
from etude.inference import NativeEngine, NativeEngineOptions
from etude.models import build_tiny_model, save_pretrained
from etude.training import PolicyLearner
from etude.trajectory import KEPT_IDS, Rollout
from etude.viewer.explain import Verdict, check_sequence

ROOM = {"response_length": 700, "prompt_length": 700}


class City(pydantic.BaseModel):
    """A city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    size: Literal["big", "small"]
    old: bool


SCHEMA = City.model_json_schema()
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["left", "</tool_call>"]}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}


def moves(message):
    assert not message.content
    assert message.tool_calls
    for call in message.tool_calls:
        assert call.function.name == "move"
        assert set(json.loads(call.function.arguments)) == {"to"}
    return len(message.tool_calls)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_a_valid_call(choice, stream):
    async def work(stage):
        more = {"tools": [ECHO, MOVE] if isinstance(choice, dict) else [MOVE], "tool_choice": choice}
        if stream:
            async with stage.client.chat.completions.stream(
                model="m", messages=[USER], parallel_tool_calls=False, **more
            ) as events:
                done = await events.get_final_completion()
        else:
            done = await stage.chat([USER], parallel_tool_calls=False, **more)
        assert done.choices[0].finish_reason == "tool_calls"
        return moves(done.choices[0].message)

    assert talk(work, engine=native(), **ROOM) == 1


def test_json_of_a_schema_in_each_dialect():
    anthropic = pytest.importorskip("anthropic")

    async def work(stage):
        chat = await stage.client.chat.completions.parse(model="m", messages=[USER], response_format=City)
        assert isinstance(chat.choices[0].message.parsed, City)
        made = await stage.client.responses.parse(model="m", input="Where?", text_format=City)
        assert isinstance(made.output_parsed, City)
        free = await stage.chat([USER], response_format={"type": "json_object"}, max_tokens=500)
        if free.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(free.choices[0].message.content), dict)
        client = anthropic.AsyncAnthropic(base_url=stage.url.removesuffix("/v1"), api_key=stage.key, max_retries=0)
        async with client:
            output = {"format": {"type": "json_schema", "schema": SCHEMA}}
            said = await client.messages.create(
                model="m", max_tokens=500, messages=[USER], extra_body={"output_config": output}
            )
            City.model_validate_json(said.content[0].text)
            tool = {"name": "move", "input_schema": MOVE["function"]["parameters"]}
            for choice in ({"type": "any"}, {"type": "tool", "name": "move"}):
                called = await client.messages.create(
                    model="m", max_tokens=500, messages=[USER], tools=[tool], tool_choice=choice
                )
                assert called.stop_reason == "tool_use"
                assert called.content[0].name == "move"
        tool = {"type": "function", "parameters": MOVE["function"]["parameters"], "name": "move"}
        for choice in ("required", {"type": "function", "name": "move"}):
            called = await stage.client.responses.create(
                model="m", input="Go.", tools=[tool], tool_choice=choice, parallel_tool_calls=False
            )
            assert [item.type for item in called.output] == ["function_call"]
            assert (called.tool_choice if isinstance(choice, str) else called.tool_choice.name) == (
                choice if isinstance(choice, str) else "move"
            )

    talk(work, engine=native(), **ROOM)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "not"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "grammar"),
        ({"tools": [{**MOVE, "function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"}, "not"),
    ],
)
def test_what_cannot_be_kept_to_is_a_400_and_the_session_lives(more, words):
    async def work(stage):
        with pytest.raises(openai.BadRequestError, match=words):
            await stage.chat([USER], **more)
        assert not stage.session.broken.done()
        done = await stage.client.chat.completions.parse(model="m", messages=[USER], response_format=City)
        assert isinstance(done.choices[0].message.parsed, City)

    talk(work, engine=native(), **ROOM)


def test_a_format_that_cannot_be_constrained_is_named():
    async def work(stage):
        with pytest.raises(openai.BadRequestError, match=r"Qwen3CoderToolParser.*tool_choice=auto.*hermes") as caught:
            await stage.chat([USER], tools=[MOVE], tool_choice="required")
        assert caught.value.param == "tool_choice"

    talk(work, engine=native(), parser=ToolParser.get_tool_parser("qwen3_coder", TOKENIZER), **ROOM)


def test_an_agent_of_pydantic_ai_gets_its_output_type():
    """By a forced call (its default), and as JSON."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def work(stage):
        model = OpenAIChatModel("m", provider=OpenAIProvider(openai_client=stage.client))
        for output in (City, pydantic_ai.NativeOutput(City)):
            done = await pydantic_ai.Agent(model, output_type=output).run("Where?")
            assert isinstance(done.output, City)

    talk(work, engine=native(), **ROOM)


def test_an_agent_of_openais_framework_gets_its_output_type():
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def work(stage):
        for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
            model = kind(model="any", openai_client=stage.client)
            done = await agents.Runner.run(agents.Agent(name="a", output_type=City, model=model), "Where?")
            assert isinstance(done.final_output, City)

    talk(work, engine=native(), **ROOM)


def test_an_agent_of_smolagents_calls_its_tools():
    """It sends tool_choice=required with every request."""
    smolagents = pytest.importorskip("smolagents")
    seen = []

    class Move(smolagents.Tool):
        name, description, output_type = "move", "Moves.", "string"
        inputs = {"to": {"type": "string", "description": "where", "enum": ["left", "right"]}}  # noqa: RUF012

        def forward(self, to: str) -> str:
            seen.append(to)
            return "moved"

    def converse(stage):
        model = smolagents.OpenAIModel(model_id="m", api_base=stage.url, api_key=stage.key)
        message = model.generate(
            [smolagents.models.ChatMessage(role="user", content="Go.")], tools_to_call_from=[Move()]
        )
        [call, *_] = message.tool_calls
        arguments = call.function.arguments
        Move()(**(json.loads(arguments) if isinstance(arguments, str) else arguments))

    async def work(stage):
        await asyncio.to_thread(converse, stage)

    talk(work, engine=native(), **ROOM)
    assert seen[0] in ("left", "right")


def test_the_trainer_computes_the_distribution_that_was_sampled_from(tmp_path):
    """A session whose first turn is forced and whose second is free, as training gets it: before an update, in float64, each
    token's ratio is 1 up to the float32 rounding of the engine's log-probs. `etude explain` leaves the first turn out."""
    model = build_tiny_model(SPEC, TOKENIZER).double()

    async def work(stage):
        first = await stage.chat([USER], tools=[MOVE], tool_choice="required", parallel_tool_calls=False)
        message = first.choices[0].message
        answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "moved"}
        await stage.chat([USER, message.model_dump(exclude_none=True), answer], tools=[MOVE], max_tokens=20)
        session = stage.session
        return validate_output(session.trajectories(), session._client, "gateway", 700)

    engine = NativeEngine(build_tiny_model(SPEC, TOKENIZER).double(), NativeEngineOptions(tokenizer=TOKENIZER))
    [trajectory] = talk(work, engine=engine, rules=SessionRules(), **ROOM)
    assert trajectory.assistant_turns == 2
    kinds = {type(kept) for kept, sampled in zip(trajectory.kept_ids, trajectory.response_mask) if sampled}
    assert type(None) in kinds
    assert len(kinds) >= 2
    save_pretrained(model, TOKENIZER, tmp_path)
    record = sequence_record(trajectory, input="", output="")
    [check] = [each for each in check_sequence(record, tmp_path) if "forward pass" in each.statement]
    assert (check.verdict, "but for those under a grammar" in check.evidence) == (Verdict.HOLDS, True)
    batch = to_batch([Rollout([trajectory])], TOKENIZER.pad_token_id or 0)
    assert KEPT_IDS in batch.non_tensor_batch
    policy = PolicyLearner(model, max_tokens=4096)
    batch.meta_info["temperature"] = 1.0
    old = policy.log_probs(batch, 1.0)[0]
    mask = batch.batch["response_mask"].bool()
    torch.testing.assert_close(old[mask].float(), batch.batch["rollout_log_probs"][mask].float(), rtol=0, atol=2e-6)
