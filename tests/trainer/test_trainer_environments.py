"""Training with environments and interactions of the user's, named by the configuration alone."""

import pytest

from etude.cli.main import cli, run
from etude.dumps import read_rollouts
from etude.errors import ConfigError
from etude.trainer.run import train

ROLLOUT = "actor_rollout_ref.rollout"
ENV = "actor_rollout_ref.env"

ENVIRONMENTS = '''
"""An Env in RL-Factory's manner, a text environment, and a user."""

from etude.agents.environments import Env, TextEnv, register_env
from etude.agents.interactions import BaseInteraction


@register_env("digits")
class Digits(Env):
    def _compute_score_with_rules(self, data, tokenizer, if_val=False):
        return [[tokenizer.decode(row.batch["responses"].tolist()).count("4") / 8] for row in data]


@register_env("again")
class Again(TextEnv):
    def reset(self, *, seed=None, options=None):
        self.turns = 0
        return f"Row {options['index']}.", {}

    def step(self, action):
        self.turns += 1
        return "And again?", action.count("4") / 8, self.turns == 2, False, {}


class Curious(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        answers = sum(m["role"] == "assistant" for m in messages)
        return answers > 1, "Why?", messages[-1]["content"].count("4") / 8, {}
'''


@pytest.fixture(scope="module")
def plugins(tiny, tmp_path_factory):
    """The override that names the user's files, written once: a file is imported once a process."""
    file = tmp_path_factory.mktemp("plugins") / "environments.py"
    file.write_text(ENVIRONMENTS)
    return f"plugins=[{tiny.folder}/agent.py,{file}]"


@pytest.fixture
def start(tiny, tmp_path, plugins):
    """Trains two steps with overrides; the records of the last."""

    def start(*overrides):
        own = [plugins, "trainer.total_training_steps=2", "custom_reward_function.path=null"]
        train(tiny.config(tmp_path / "run", *own, *overrides))
        return list(read_rollouts(tmp_path / "run" / "rollouts" / "2.jsonl"))

    return start


@pytest.mark.parametrize("how", [f"{ROLLOUT}.mode=async", f"{ROLLOUT}.mode=sync"])
def test_an_env_of_the_users_trains_and_scores(start, how):
    deterministic = f"trainer.deterministic={'async' in how}"
    records = start(f"{ENV}.name=digits", "reward_model.reward_manager=parallel", how, deterministic)
    assert len(records) == 8
    for record in records:
        assert record["rewards"]["score"] == record["output"].count("4") / 8
    assert any(record["tool_calls"] for record in records)


def test_lock_step_does_not_go_with_determinism(start):
    with pytest.raises(ConfigError, match="trajectories wait for each other"):
        start(f"{ENV}.name=digits", "reward_model.reward_manager=parallel", f"{ROLLOUT}.mode=sync")


def test_a_text_environment_trains(start):
    records = start(f"{ENV}.name=again", "reward_model.enable=false", f"{ROLLOUT}.multi_turn.max_assistant_turns=3")
    assert all("Row " in record["input"] for record in records)
    assert {len(record["rewards"]["steps"]) for record in records} <= {1, 2}
    assert max(record["assistant_turns"] for record in records) == 2


def test_an_env_scores_validation_rows_too(tiny, tmp_path, plugins):
    arguments = [
        plugins,
        "custom_reward_function.path=null",
        f"{ENV}.name=digits",
        "reward_model.reward_manager=parallel",
        f"data.val_files={tiny.folder}/data/test.parquet",
        "trainer.total_training_steps=1",
    ]
    assert run(cli, ["train", *tiny.arguments(tmp_path / "run", *arguments)]) == 0


def test_the_parallel_manager_needs_an_environment(start):
    with pytest.raises(ConfigError, match=r"reward_manager=parallel \(command line\): is the environment's score"):
        start("reward_model.reward_manager=parallel")


def test_an_interaction_of_the_users_trains(start, tiny, tmp_path, plugins):
    import pyarrow.parquet as pq

    from etude.data import write_parquet

    rows = pq.read_table(tiny.folder / "data" / "train.parquet").to_pylist()
    for row in rows:
        row["extra_info"]["interaction_kwargs"] = {"name": "curious"}
    write_parquet(rows, tmp_path / "train.parquet")
    file = plugins.rpartition(",")[2].rstrip("]")
    (tmp_path / "users.yaml").write_text(f"interaction: [{{class_name: '{file}:Curious'}}]")
    records = start(
        f"data.train_files={tmp_path}/train.parquet",
        f"{ROLLOUT}.multi_turn.interaction_config_path={tmp_path}/users.yaml",
        "data.max_response_length=120",
        f"custom_reward_function.path={tiny.folder}/agent.py",
    )
    asked = [r for r in records if any(m["role"] == "user" and m["content"] == "Why?" for m in r["messages"])]
    assert asked
    assert all(any(name == "interaction" for _, name, _ in r["rewards"]["steps"]) for r in asked)
