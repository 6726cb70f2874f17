"""Agents as users write them, used as users use them: a file named in `plugins`, a YAML for the tool, nothing patched."""

import asyncio
import json
from pathlib import Path

import pytest
import yaml
from workers_stage import objects

from etude.agents import AgentLoopManager, Sampling
from etude.agents.batch import rows_of
from etude.config import compose
from etude.inference import ScriptedEngine
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.protocol import DataProto
from etude.trainer.setup import prepare
from etude.trajectory import Provenance, StopReason

ROOT = Path(__file__).parents[2]
DOCUMENTED = Path(__file__).with_name("documented_agent.py")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A model whose context is long enough for a page of search results."""
    folder = tmp_path_factory.mktemp("user_model")
    tokenizer = build_tiny_tokenizer((ROOT / "examples/minimal_agent/rows.jsonl").read_text().splitlines(), 400)
    spec = TinyModelSpec(
        hidden_size=32, num_layers=1, intermediate_size=64, vocab_size=400, max_position_embeddings=2048
    )
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, folder)
    return str(folder)


def worker_for(config):
    """(worker, the training rows as a batch)."""
    setup, groups = prepare(config)
    rows = [
        row | {"uid": f"u{i}", "rollout_index": i}
        for i, row in enumerate(setup.dataset(setup.options.data.train_files))
    ]
    group = groups.rollout
    group.init_model()
    group.update_weights(0)
    batch = DataProto.from_single_dict({key: objects([row.get(key) for row in rows]) for key in rows[0]})
    batch.meta_info = {"seed": 1, "validate": False}
    return group, group._workers[0], batch


def scripted(worker, batch, script):
    """The worker's own loops, parser, tools and scorer, with an engine that says `script[turn]`."""
    manager = worker._manager
    stop = manager.context.chat.end_of_turn_id

    def turns(request_id, prompt, turn):
        return [*worker.tokenizer.encode(script[turn], add_special_tokens=False), stop]

    played = AgentLoopManager(manager.context, ScriptedEngine(turns), manager.scorer)
    return asyncio.run(played.generate(rows_of(batch), Sampling(1.0, 1.0, -1, seed=1)))


@pytest.fixture
def example(small_model, monkeypatch):
    """The example as its README starts it: from the root of the repository."""
    monkeypatch.chdir(ROOT)
    overrides = [f"actor_rollout_ref.model.path={small_model}", "data.max_response_length=160"]
    return compose("agent", overrides, "examples/minimal_agent")


def test_the_example_rolls_out_with_a_real_engine(example):
    group, worker, batch = worker_for(example)
    out = group.generate_sequences(batch)
    assert len(out) == 4
    mask = out.batch["response_mask"].bool()
    assert mask.any()
    assert out.batch["rollout_log_probs"][mask].max() <= 0
    for result in out.non_tensor_batch["rollout"]:
        assert set(result.trajectory.rewards.score_info) == {"acc"}
    assert worker.context.tools["atlas"]._misses == {}


def test_the_example_looks_up_counts_down_and_scores(example):
    _, worker, batch = worker_for(example)
    script = ["LOOKUP Atlantis\nLOOKUP Japan", "LOOKUP Peru", "Tokyo"]
    france, japan, *_ = scripted(worker, batch, script)
    trajectory = japan.trajectory
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert [record.response for record in trajectory.tool_calls] == ["No such country in the atlas.", "Tokyo"]
    decode = worker.tokenizer.decode
    shown = [decode(s.token_ids) for s in trajectory.segments if s.provenance is Provenance.USER]
    assert "".join(shown) == "Look-ups left: 0."
    assert trajectory.assistant_turns == 2  # the third look-up was not granted
    assert trajectory.rewards.final == {"atlas": -0.1}
    assert trajectory.rewards.score_info == {"acc": 0.0}
    assert france.trajectory.rewards.score == 0.0
    assert worker.context.tools["atlas"]._misses == {}
    answered = scripted(worker, batch, ["LOOKUP Japan", "Tokyo"])[1].trajectory
    assert answered.rewards.score == pytest.approx(0.9)  # right, with two messages more than the shortest way
    assert answered.rewards.score_info == {"acc": 1.0}


@pytest.fixture
def documented(small_model, tmp_path):
    """Configuration of the documented agent: its tool's YAML and its rows are written as the document writes them."""
    schema = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches the web.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
    entry = {"class_name": f"{DOCUMENTED}:MyWebSearchTool", "config": {"type": "native", "num_results": 2}}
    (tmp_path / "tool.yaml").write_text(yaml.safe_dump({"tools": [{**entry, "tool_schema": schema}]}))
    row = {
        "agent_name": "my_tool_agent",
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "total number of death row inmates in the us?"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": ["2,718"]}, "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(3)))

    def config(*overrides):
        return compose(
            "grpo_trainer",
            [
                f"plugins=[{DOCUMENTED}]",
                f"data.train_files={tmp_path}/rows.jsonl",
                "data.max_response_length=600",
                f"actor_rollout_ref.model.path={small_model}",
                "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
                "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=3",
                f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/tool.yaml",
                "actor_rollout_ref.rollout.multi_turn.format=my_model_toolparser",
                "actor_rollout_ref.rollout.mode=async",
                "reward_model.reward_manager=my_reward_manager",
                f"custom_reward_function.path={DOCUMENTED}",
                "custom_reward_function.name=compute_score",
                *overrides,
            ],
        )

    return config


def test_the_documented_agent_runs_with_its_imports_renamed(documented):
    _, worker, batch = worker_for(documented())
    search = '<tool_call>{"name": "search", "arguments": {"query": "inmates"}}</tool_call>'
    results = scripted(worker, batch, [search, "<answer>2,718</answer>"])
    assert [r.failures for r in results] == [0, 0, 0]
    tools = {name: tool.get_openai_tool_schema().to_openai() for name, tool in worker.context.tools.items()}
    trajectory = results[0].trajectory
    assert trajectory.prompt_ids == worker._manager.context.chat.initial_ids(
        batch.non_tensor_batch["raw_prompt"][0], list(tools.values())
    )
    text = worker.tokenizer.decode(trajectory.response_ids)
    assert text.startswith(search)
    assert "About inmates" in text
    kinds = [s.provenance for s in trajectory.segments]
    assert kinds == [Provenance.SAMPLED, Provenance.TOOL, Provenance.SAMPLED]
    assert trajectory.num_turns == 4
    assert trajectory.rewards.score == 1.0
    assert trajectory.rewards.score_info == {"acc": 1.0, "turns": 4}


def test_the_documented_agent_trains_on_the_engines_log_probs(documented):
    """It returns none; those that the engine reported stand in their places."""
    group, _, batch = worker_for(documented("data.max_response_length=40"))
    out = batch.union(group.generate_sequences(batch))
    out.meta_info["temperature"] = 1.0
    mask = out.batch["response_mask"].bool()
    computed = group.compute_log_prob(out).batch["old_log_probs"]
    assert (computed[mask] < -1).any()
    assert abs(computed - out.batch["rollout_log_probs"])[mask].max() < 1e-4


def test_a_batch_reward_manager_of_the_documents_scores_row_by_row(documented):
    group, _, batch = worker_for(
        documented("reward_model.reward_manager=my_batch_manager", "data.max_response_length=9")
    )
    out = group.generate_sequences(batch)
    scores = [r.trajectory.rewards.score for r in out.non_tensor_batch["rollout"]]
    assert scores == out.batch["response_mask"].sum(1).tolist()
