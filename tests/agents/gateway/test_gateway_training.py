"""A training run whose agent is written with the `openai` client and knows nothing of what trains it: it calls a tool,
takes two choices, and ends with a history that it has rewritten. What it learns from is verified as `etude explain` does."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
from house_stage import ROLLOUT, metrics, same, weights
from safetensors.torch import load_file

from etude.dumps import read_rollouts, sequences_of, trajectory_from_record
from etude.trainer.run import evaluate, train
from etude.viewer.explain import check_overlap, check_sequence
from etude.viewer.exports import export_rollouts
from etude.viewer.index import RolloutIndex

AGENT = """
import json

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def computed(call):
    a, _, b = json.loads(call.function.arguments)["expression"].split()
    return str(int(a) + int(b))


async def run(client, row):
    messages = list(row["raw_prompt"])
    for _ in range(2):
        made = await client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=[CALCULATOR], n=2, max_tokens=20, temperature=0.2
        )
        choice = max(made.choices, key=lambda choice: bool(choice.message.tool_calls))
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": computed(call)})
        if not choice.message.tool_calls:
            break
    short = [{"role": "user", "content": f"Say it again: {choice.message.content}"}]
    stream = await client.chat.completions.create(model="gpt-4o", messages=short, stream=True, max_tokens=20)
    async for chunk in stream:
        pass
"""


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Two runs with one seed, whose agents differ in one thing: only the first one's last request is streamed."""
    folder = tmp_path_factory.mktemp("runs")
    whole = AGENT.replace("stream=True, ", "").replace("    async for chunk in stream:\n        pass\n", "")
    for name, source in (("one", AGENT), ("two", whole)):
        (folder / f"{name}.py").write_text(source)

    def run(name):
        train(
            tiny.config(
                folder / name,
                f"{ROLLOUT}.agent.default_agent_loop=openai_agent",
                f"{ROLLOUT}.agent.openai_agent.function={folder}/{name}.py:run",
                "trainer.total_training_steps=3",
            )
        )
        return folder / name

    return [run("one"), run("two")]


def records(run):
    return [record for path in sorted((run / "rollouts").glob("*.jsonl")) for record in read_rollouts(path)]


def test_the_weights_change(runs, tiny):
    trained, before = weights(runs[0], 3), load_file(tiny.model / "model.safetensors")
    assert not same(trained, {name: before[name] for name in trained})
    norms = [record["actor/grad_norm"] for record in metrics(runs[0]) if "actor/grad_norm" in record]
    assert any(norms)
    assert all(map(math.isfinite, norms))


def test_every_sequence_is_exact(runs, tiny):
    found = [record for record in records(runs[0]) if record["step"] == 1]
    assert len(found) == 8
    for record in found:
        for sequence in sequences_of(record):
            checks = {check.statement: check.verdict.value for check in check_sequence(sequence, tiny.model)}
            assert set(checks.values()) == {"holds"}, checks
        assert check_overlap(record).verdict.value in ("holds", "skipped")


def test_choices_left_behind_and_the_rewritten_history_are_sequences_of_their_own(runs):
    figures = [record for record in metrics(runs[0]) if "rollout/sequences/mean" in record]
    assert figures
    for record in records(runs[0]):
        sequences = [trajectory_from_record(sequence) for sequence in sequences_of(record)]
        assert len(sequences) >= 3
        *_, main = sequences
        assert main.messages[0]["content"].startswith("Say it again")
        assert main.rewards.score is not None
        assert all(sequence.sampling == {"temperature": 1.0, "top_p": 1.0, "top_k": -1} for sequence in sequences)


def test_the_same_seed_gives_the_same_bits_streamed_or_not(runs):
    one, two = ([record["response_ids"] for record in records(run)] for run in runs)
    assert one == two
    assert same(weights(runs[0], 3), weights(runs[1], 3))


CALLER = '''
"""A model that knows no tools, read as if most of its turns were calls."""

import json

from etude.chat import ParsedResponse, ToolParser
from etude.schemas import FunctionCall


@ToolParser.register("caller")
class Caller(ToolParser):
    stop_token_ids = tuple(range(10, 4000, 7))  # a turn is a few tokens

    def parse(self, text, tools=None):
        call = FunctionCall(name="calculator", arguments=json.dumps({"expression": "2 + 5"}))
        return ParsedResponse(text, [call] if len(text) % 4 else [])
'''
SDK_AGENT = '''
import agents

agents.set_tracing_disabled(True)


@agents.function_tool
def calculator(expression: str) -> str:
    """Computes."""
    a, _, b = expression.split()
    return str(int(a) + int(b))


async def run(client, row):
    model = agents.OpenAIResponsesModel(model="any", openai_client=client)
    agent = agents.Agent(name="sums", instructions="Use the calculator.", tools=[calculator], model=model)
    try:
        await agents.Runner.run(agent, row["raw_prompt"][-1]["content"], max_turns=4)
    except agents.MaxTurnsExceeded:
        pass
'''
GRAPH_AGENT = '''
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calculator(expression: str) -> str:
    """Computes."""
    a, _, b = expression.split()
    return str(int(a) + int(b))


async def run(base_url, api_key, row):
    model = ChatOpenAI(model="any", base_url=base_url, api_key=api_key, max_retries=0).bind_tools([calculator])

    async def ask(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge("__start__", "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    await graph.compile().ainvoke({"messages": row["raw_prompt"]})
'''
MESSAGES_AGENT = """
import anthropic

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOL = {"name": "calculator", "description": "Computes.", "input_schema": SCHEMA}


async def run(base_url, api_key, row):
    messages = [message for message in row["raw_prompt"] if message["role"] != "system"]
    async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        for _ in range(2):
            async with client.messages.stream(model="any", max_tokens=24, messages=messages, tools=[TOOL]) as stream:
                made = await stream.get_final_message()
            calls = [block for block in made.content if block.type == "tool_use"]
            messages.append({"role": "assistant", "content": made.content})
            if not calls:
                break
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "7"} for call in calls]
            messages.append({"role": "user", "content": results})
"""


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    file = tmp_path_factory.mktemp("caller") / "caller.py"
    file.write_text(CALLER)
    return file


@pytest.mark.parametrize(
    ("needed", "code"),
    [("agents", SDK_AGENT), ("langgraph", GRAPH_AGENT), ("anthropic", MESSAGES_AGENT)],
    ids=["openai-agents", "langgraph", "anthropic"],
)
def test_an_agent_of_a_framework_is_trained_as_it_stands(tiny, tmp_path, caller, needed, code):
    pytest.importorskip(needed)
    (tmp_path / "framework_agent.py").write_text(code)
    train(
        tiny.config(
            tmp_path / "run",
            f"{ROLLOUT}.agent.default_agent_loop=openai_agent",
            f"{ROLLOUT}.agent.openai_agent.function={tmp_path}/framework_agent.py:run",
            f"plugins=[{tiny.folder}/agent.py,{caller}]",
            f"{ROLLOUT}.multi_turn.format=caller",
            "trainer.total_training_steps=1",
            "data.max_prompt_length=512",
            "data.max_response_length=512",
        )
    )
    found = records(tmp_path / "run")
    assert len(found) == 8
    assert max(len(trajectory_from_record(each).tool_calls) for each in found) >= 1
    assert all(len(sequences_of(record)) == 1 for record in found)  # each turn continues the one before
    for sequence in (each for record in found for each in sequences_of(record)):
        assert {check.verdict.value for check in check_sequence(sequence, tiny.model)} == {"holds"}
    assert not same(weights(tmp_path / "run", 1), load_file(tiny.model / "model.safetensors"))


def test_turns_and_calls_are_counted_over_all_sequences(tiny, tmp_path, caller):
    """The main sequence says the result again: whatever was called is in those that the agent left behind."""
    (tmp_path / "agent.py").write_text(AGENT)
    train(
        tiny.config(
            tmp_path / "run",
            f"{ROLLOUT}.agent.default_agent_loop=openai_agent",
            f"{ROLLOUT}.agent.openai_agent.function={tmp_path}/agent.py:run",
            f"plugins=[{tiny.folder}/agent.py,{caller}]",
            f"{ROLLOUT}.multi_turn.format=caller",
            "trainer.total_training_steps=1",
            "data.max_prompt_length=512",
        )
    )
    [figures] = [record for record in metrics(tmp_path / "run") if record["step"] == 1]
    rollouts = [sequences_of(record) for record in records(tmp_path / "run")]
    calls = [sum(len(each["tool_calls"]) for each in sequences) for sequences in rollouts]
    assert sum(calls) > sum(len(main["tool_calls"]) for *_, main in rollouts)
    assert figures["tool_call_counts/mean"] == np.mean(calls)
    assert figures["tool/calculator/calls"] == sum(calls)
    assert figures["rollout/tool_use_rate"] > 0
    turns = [
        sum(len({run["turn"] for run in each["segments"] if "log_probs" in run}) for each in own) for own in rollouts
    ]
    answers = [sum(each["user_turns"] for each in own) for own in rollouts]
    assert figures["num_turns/mean"] == np.mean([1 + own + more for own, more in zip(turns, answers)])
    index = RolloutIndex(tmp_path / "run")
    index.refresh()
    shown = sorted((row for row in index.rows if row.split == "train"), key=lambda row: row.line)
    assert [(row.turns, row.calls) for row in shown] == list(zip(turns, calls))
    export_rollouts(index, shown, "parquet", tmp_path / "all.parquet")
    table = pq.read_table(tmp_path / "all.parquet").to_pylist()
    assert [(row["turns"], len(json.loads(row["tool_calls"]))) for row in table] == list(zip(turns, calls))


def test_an_evaluation_counts_the_calls_that_the_agent_answered(tiny, tmp_path, caller):
    (tmp_path / "submits.py").write_text(
        AGENT[: AGENT.index("async def run")] + "async def run(client, row):\n"
        "    await client.chat.completions.create(model='any', messages=row['raw_prompt'], tools=[CALCULATOR])\n"
    )
    result = evaluate(
        tiny.config(
            tmp_path / "run",
            f"data.val_files={tiny.folder}/data/test.parquet",
            f"{ROLLOUT}.agent.default_agent_loop=openai_agent",
            f"{ROLLOUT}.agent.openai_agent.function={tmp_path}/submits.py:run",
            f"plugins=[{tiny.folder}/agent.py,{caller}]",
            f"{ROLLOUT}.multi_turn.format=caller",
            f"{ROLLOUT}.val_kwargs.n=4",
            f"{ROLLOUT}.val_kwargs.do_sample=true",
            "data.max_prompt_length=512",
        ),
        dump_folder=tmp_path / "dump",
    )
    assert any(record["tool_calls"] for record in read_rollouts(tmp_path / "dump" / "0.jsonl"))
    assert result["tool_use"] == 0.0
