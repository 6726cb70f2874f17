"""Training on environments named by the key `env` alone: their tasks are the rows, and their rewards the only ones."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from house_stage import ROLLOUT

from etude.dumps import read_rollouts, sequences_of
from etude.errors import ConfigError, DataError
from etude.trainer.run import train
from etude.workers import RolloutWorker

ROOT = Path(__file__).parents[2]
VERIFIERS = os.environ.get("ETUDE_VERIFIERS_PYTHON") or shutil.which(ROOT / "build" / "verifiers" / "bin" / "python")
ENVIRONMENTS = '''
import aiohttp

from etude.environments import Environment, Step, environment, tool


class Fours(Environment):
    version = "1"

    def __init__(self, twice=False):
        self.twice = twice

    def tasks(self, split):
        yield from ({"number": n} for n in range(20 if split == "train" else 30))

    def reset(self, task, seed):
        self.text = ""
        return f"Write {task['number']} fours."

    def step(self, text):
        self.text += text
        return Step("More.", done=not self.twice, metrics={"length": len(text)})

    def score(self):
        return {"score": self.text.count("4") / 8, "acc": 0.0}


class Seeded(Environment):
    def reset(self, task, seed):
        self.seed = seed
        return f"Seed {seed}."

    def step(self, text):
        return Step(reward=text.count("4") / 8, done=True)

    @tool
    def look(self) -> str:
        """Looks."""
        return str(self.seed)


class Driver(Environment):
    def reset(self, task, seed):
        self.seed = seed
        return ""

    async def drive(self, base_url, api_key):
        body = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": f"Seed {self.seed}."}]}
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
            async with http.post(f"{base_url}/chat/completions", json=body) as answer:
                text = (await answer.json())["choices"][0]["message"]["content"]
        return {"score": text.count("4") / 8, "acc": 1.0, "length": len(text)}


class Duel(Driver):
    async def drive(self, base_url, api_key):
        said = {}
        for role in ("white", "black"):
            body = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": f"Seed {self.seed}."}]}
            headers = {"Authorization": f"Bearer {api_key}", "X-Agent-Role": role}
            async with aiohttp.ClientSession(headers=headers) as http:
                async with http.post(f"{base_url}/chat/completions", json=body) as answer:
                    said[role] = (await answer.json())["choices"][0]["message"]["content"].count("4")
        lead = (said["white"] - said["black"]) / 8
        return {"score": {"white": lead, "black": -lead}, "moves": 2.0}


for name, kind in {"fours": Fours, "seeded": Seeded, "driver": Driver, "duel": Duel}.items():
    environment(name)(kind)
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    file = tmp_path_factory.mktemp("plugins") / "acting.py"
    file.write_text(ENVIRONMENTS)
    return f"plugins=[{file}]"


OWN = [f"{ROLLOUT}.multi_turn.tool_config_path=null", f"{ROLLOUT}.multi_turn.format=hermes"]


@pytest.fixture
def start(tiny, tmp_path, plugin):
    """Trains with overrides; the records of the last step, and the metrics by step."""

    def start(*overrides, steps=2):
        own = [*OWN, plugin, f"trainer.total_training_steps={steps}", "custom_reward_function.path=null"]
        own += ["data.train_files=[]", "data.val_files=[]", "trainer.logger=[jsonl]"]
        train(tiny.config(tmp_path / "run", *own, *overrides))
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return list(read_rollouts(tmp_path / "run" / "rollouts" / f"{steps}.jsonl")), [*map(json.loads, lines)]

    return start


def test_an_environment_that_drives_itself_rewards_each_role(start):
    given = f"{ROLLOUT}.agent.roles=[white,black]", "reward_model.enable=false", "algorithm.adv_estimator=rae"
    records, metrics = start("env=[{id: duel, tasks: 4}]", *given, steps=1)
    for record in records:
        white, black = sequences_of(record)
        assert (white["role"], black["role"]) == ("white", "black")
        assert white["rewards"]["score"] == -black["rewards"]["score"] == record["rewards"]["score"] * -1
        assert record["extra_fields"]["environment"]["metrics"] == {"moves": 2.0}
    assert metrics[-1]["role/white/score/mean"] == pytest.approx(-metrics[-1]["role/black/score/mean"])


def test_an_environments_tasks_are_the_rows_and_its_score_the_reward(start):
    records, metrics = start("env=fours")
    for record in records:
        assert record["rewards"]["score"] == record["output"].count("4") / 8
        assert f"Write {record['extra_info']['task']['number']} fours." in record["input"]
    last = metrics[-1]
    totals = [record["score"] for record in records]
    assert last["env/fours/reward/mean"] == pytest.approx(sum(totals) / len(totals))
    assert last["env/fours/episodes"] == len(records)
    assert last["env/fours/metrics/length"] > 0
    assert any(name.startswith("val-core/fours/") for name in last)


def test_an_environment_that_drives_itself_asks_the_policy_through_the_gateway(start):
    records, metrics = start("env=driver", steps=1)
    assert {record["score"] for record in records} == {record["output"].count("4") / 8 for record in records}
    assert all(f"Seed {record['extra_info']['env_seed']}." in record["input"] for record in records)
    assert metrics[-1]["env/driver/episodes"] == len(records)
    assert metrics[-1]["env/driver/metrics/length"] > 0
    assert metrics[-1]["env/driver/success/mean"] == metrics[-1]["reward/success/mean"] == 1.0


def test_a_mixed_run_draws_by_weight(start):
    env = "env=[{id: fours, weight: 3}, {id: seeded, tasks: 7, name: other, args: {}}]"
    records, metrics = start(env, "data.train_batch_size=4")
    named = [record["extra_info"]["env"] for record in records]
    assert named.count("fours") == 3 * named.count("other") > 0
    seeds = {record["extra_info"]["env_seed"] for record in records if record["extra_info"]["env"] == "other"}
    assert all(seed < 14 and seed % 2 == 0 for seed in seeds)
    assert {"env/fours/episodes", "env/other/episodes"} <= metrics[-1].keys()


def test_rows_of_files_are_the_only_ones_also_for_validation(start, tmp_path):
    row = {"data_source": "own", "prompt": [{"role": "user", "content": "Go."}], "extra_info": {"number": 3}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    records, metrics = start("env=fours", f"data.train_files=[{tmp_path}/rows.jsonl]", steps=1)
    assert {"Write 3 fours." in record["input"] for record in records} == {True}
    assert not any(name.startswith("val-core/") for name in metrics[-1])


def test_a_limit_goes_with_an_engine_that_waits_for_every_trajectory(start):
    records, _ = start("env=[{id: fours, limit: 2}]", "trainer.deterministic=true")
    assert len(records) == 8


@pytest.mark.parametrize(("limit", "share"), [(5, 2), (1, 1)])
def test_ranks_that_wait_for_all_their_trajectories_share_a_limit(tiny, tmp_path, plugin, limit, share):
    env = f"env=[{{id: fours, limit: {limit}}}]"
    options = tiny.config(tmp_path / "run", *OWN, plugin, env, "trainer.deterministic=true")
    context = RolloutWorker(options, rank=1, world_size=2).context
    assert context.options.max_concurrent_trajectories == share


def test_a_resumed_run_needs_the_same_environments(start):
    start("env=fours", "trainer.save_freq=1", steps=1)
    start("env=[{id: fours, timeout: 30}]", "trainer.save_freq=1", steps=2)  # nothing that tasks or rewards depend on
    with pytest.raises(ConfigError, match="env"):
        start("env=[{id: fours, args: {twice: true}}]", steps=3)


def test_another_version_is_not_resumed(start, monkeypatch):
    from etude.environments.base import ENVIRONMENTS

    start("env=fours", "trainer.save_freq=1", steps=1)
    monkeypatch.setattr(ENVIRONMENTS.get("fours"), "version", "2")
    with pytest.raises(DataError, match="env 'fours'"):
        start("env=fours", steps=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=fuors"], r"env\[0\]: unknown environment 'fuors'.*did you mean 'fours'"),
        (["env=[{id: fours, args: {thrice: true}}]"], r"env\[0\]: environment 'fours': args:.*thrice"),
        (["env=[{id: fours, taks: 3}]"], r"unknown key env\[0\].taks; did you mean 'tasks'"),
        (["env=[{id: fours, weight: 0}]"], "every weight is 0"),
        (["env=fours", "actor_rollout_ref.env.name=base"], "two ways to choose an environment"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(start, overrides, message):
    with pytest.raises(ConfigError, match=message):
        start(*overrides)


@pytest.mark.slow
@pytest.mark.skipif(
    VERIFIERS is None, reason="needs verifiers 0.4: ETUDE_VERIFIERS_PYTHON, or build/verifiers/bin/python"
)
def test_two_steps_are_trained_on_a_taskset_of_verifiers_as_the_page_lists_it(start, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "from-verifiers.md").read_text()
    (tmp_path / "stock.py").write_text(re.search(r"```python\n(# stock.py.*?)```", page, re.DOTALL)[1])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    args = 'args: {agent: {harness: {id: "null"}, max_turns: 2}}'
    records, metrics = start(
        f'env=[{{id: "verifiers:stock", name: stock, python: {VERIFIERS}, val_tasks: 0, {args}}}]',
        "data.train_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        f"{ROLLOUT}.n=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    )
    assert metrics[-1]["env/stock/episodes"] == len(records) == 2
    assert all(record["score"] in (0.0, 0.1, 1.0, 1.1) for record in records)
