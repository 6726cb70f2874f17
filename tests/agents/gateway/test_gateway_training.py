"""A training run whose agent is written with the `openai` client and knows nothing of what trains it: it calls a tool,
takes two choices, and ends with a history that it has rewritten. What it learns from is verified as `etude explain` does."""

import math

import pytest
from house_stage import ROLLOUT, metrics, same, weights
from safetensors.torch import load_file

from etude.dumps import read_rollouts, sequences_of, trajectory_from_record
from etude.trainer.run import train
from etude.viewer.explain import check_overlap, check_sequence

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
    """Two runs with one seed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "openai_agent.py").write_text(AGENT)

    def run(name):
        train(
            tiny.config(
                folder / name,
                f"{ROLLOUT}.agent.default_agent_loop=openai_agent",
                f"{ROLLOUT}.agent.openai_agent.function={folder}/openai_agent.py:run",
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


def test_the_same_seed_gives_the_same_bits(runs):
    one, two = ([record["response_ids"] for record in records(run)] for run in runs)
    assert one == two
    assert same(weights(runs[0], 3), weights(runs[1], 3))
