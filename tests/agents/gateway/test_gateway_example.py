"""The example is trained as it stands, and runs against a served policy as it stands."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from gateway_stage import native, served

from etude.config import compose
from etude.dumps import read_rollouts, sequences_of
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.registry import import_object
from etude.trainer.run import train
from etude.viewer.explain import check_sequence

ROOT = Path(__file__).parents[3]
SPEC = TinyModelSpec(hidden_size=32, num_layers=1, intermediate_size=64, initializer_range=0.3, vocab_size=400)


@pytest.fixture
def in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_it_is_trained(in_the_root, tmp_path):
    tokenizer = build_tiny_tokenizer((ROOT / "examples/openai_agent/rows.jsonl").read_text().splitlines(), 400)
    save_pretrained(build_tiny_model(SPEC, tokenizer), tokenizer, tmp_path / "model")
    overrides = [
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"trainer.default_local_dir={tmp_path}/run",
        f"trainer.rollout_data_dir={tmp_path}/rollouts",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.rollout.n=2",
        "data.max_response_length=96",
        "trainer.num_threads=1",
        "trainer.logger=[]",
        "trainer.report=false",
    ]
    figures = train(compose("agent", overrides, "examples/openai_agent"))
    assert all(math.isfinite(value) for value in figures.values())
    records = list(read_rollouts(tmp_path / "rollouts/1.jsonl"))
    assert len(records) == 8
    for record in records:
        sequences = sequences_of(record)
        assert len(sequences) == 2
        checks = [check for sequence in sequences for check in check_sequence(sequence, tmp_path / "model")]
        assert {check.verdict.value for check in checks} == {"holds"}


def test_it_runs_against_a_served_policy(in_the_root):
    run = import_object("examples/openai_agent/agent.py:run")
    row = {"raw_prompt": [{"role": "user", "content": "Peru?"}], "reward_model": {"ground_truth": "Lima"}}

    async def main():
        async with served(native(), response_length=200) as stage:
            client = stage.client.with_options(timeout=60)
            return await run(client, row), stage.session.trajectories()

    reward, trajectories = asyncio.run(main())
    assert reward in (0.0, 1.0)
    assert len(trajectories) == 2


@pytest.mark.parametrize(("said", "worth"), [("Lima.", 1.0), ("Paris", 0.0), ("Paris Tokyo Nairobi Lima", 0.0)])
def test_a_list_of_all_answers_is_not_paid(in_the_root, said, worth):
    class Client:
        def __init__(self):
            self.chat = SimpleNamespace(completions=self)

        async def create(self, **asked):
            return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=said, tool_calls=None))])

    row = {"raw_prompt": [{"role": "user", "content": "Peru?"}], "reward_model": {"ground_truth": "Lima"}}
    assert asyncio.run(import_object("examples/openai_agent/agent.py:run")(Client(), row)) == worth
    assert import_object("examples/minimal_agent/agent.py:compute_score")(said, "Lima") == worth


@pytest.mark.parametrize(
    ("arguments", "found"),
    [('{"country": "Peru"}', "Peru: Lima"), ("{", "No such"), ('{"country": []}', "No such"), ("[]", "No such")],
)
def test_its_tool_takes_whatever_a_policy_writes(in_the_root, arguments, found):
    assert import_object("examples/openai_agent/agent.py:look_up")(arguments).startswith(found)
