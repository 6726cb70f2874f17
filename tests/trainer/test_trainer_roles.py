"""Rewards per role in training: credit by hand, and a game that the policy plays against itself and learns."""

import json

import numpy as np
import pytest
import torch
from house_stage import same, weights

from etude.agents import Rollout, to_batch
from etude.agents.batch import place_scores
from etude.algorithms.advantages import running_means
from etude.config import compose
from etude.data.files import write_parquet
from etude.dumps import read_rollouts, sequences_of
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.options import RewardOptions, TrainOptions
from etude.run_folder import read_metrics
from etude.trainer.group_filter import count_spread, spread_groups
from etude.trainer.metrics import data_metrics
from etude.trainer.rollouts import part_totals, parts_of
from etude.trainer.run import train
from etude.trainer.sequences import expand_sequences, sequence_advantages, sequence_scores
from etude.trainer.verify import verify_step
from etude.trajectory import Provenance, Trajectory


def sequence(role, length, score=None, steps=()):
    made = Trajectory("r", [1, 2], role=role, assistant_turns=1)
    made.append([5] * length, Provenance.SAMPLED, log_probs=[-0.5] * length)
    made.segments[0] = made.segments[0]._replace(turn=0)
    made.rewards.score, made.rewards.steps = score, list(steps)
    return made


def rolled(*rollouts, uids=None):
    batch = to_batch([Rollout(list(each)) for each in rollouts], 0)
    for name, values in (("uid", uids or ["a"] * len(rollouts)), ("data_source", ["game"] * len(rollouts))):
        batch.non_tensor_batch[name] = np.array(values, dtype=object)
    place_scores(batch, RewardOptions())
    return batch


def expanded(*rollouts, uids=None):
    return expand_sequences(rolled(*rollouts, uids=uids), 0, RewardOptions())


def duels():
    """Two games: white won the first, black the second, each in two sequences of one player."""
    return expanded(
        [sequence("white", 1), sequence("black", 2, -1.0), sequence("white", 1, 1.0)],
        [sequence("black", 1), sequence("white", 1, -0.5, [(0, "env", -0.5)]), sequence("black", 1, 1.0)],
        [sequence("white", 1, 0.0), sequence("black", 1, 0.5)],
    )


def of(name, batch, **options):
    found, _ = sequence_advantages(name, batch, sequence_scores(batch, episodes=False), **options)
    return [sorted({round(value, 6) for value in row[mask].tolist()}) for row, mask in _rows(found, batch)]


def _rows(values, batch):
    return zip(values, batch.batch["response_mask"].bool())


def test_each_role_is_compared_with_its_own():
    batch = duels()  # rows: white w b / black b w / black w
    assert batch.non_tensor_batch["role"].tolist() == [
        "white",
        "white",
        "black",
        "black",
        "black",
        "white",
        "black",
        "white",
    ]
    assert batch.batch["token_level_scores"].sum(dim=1).tolist() == [1.0, 0.0, -1.0, 1.0, 0.0, -1.0, 0.5, 0.0]
    white, black = {0: 1.0, 1: -1.0, 2: 0.0}, {0: -7 / 6, 1: 5 / 6, 2: 1 / 3}
    expected = [white[0], white[0], black[0], black[1], black[1], white[1], black[2], white[2]]
    found = of("grpo", batch, norm_adv_by_std_in_grpo=False)
    assert [values[0] for values in found] == pytest.approx(expected, abs=1e-6)
    assert all(len(values) == 1 for values in found)


def test_numbered_agents_are_compared_within_their_rollout_and_others_across():
    """A proposer and two solvers: a hard problem's solvers are not held against an easy one's."""
    batch = expanded(
        [sequence("solver/0", 1, 1.0), sequence("solver/1", 2, 0.5), sequence("proposer", 1, 0.25)],
        [sequence("solver/0", 1, 0.25), sequence("solver/1", 1, 0.0), sequence("proposer", 2, 1.0)],
    )  # rows: proposer, solver/0, solver/1
    found = of("hierarchical_grpo", batch, norm_adv_by_std_in_grpo=False)
    assert [values[0] for values in found] == [-0.375, 0.25, -0.25, 0.375, 0.125, -0.125]
    found = of("grpo", batch, norm_adv_by_std_in_grpo=False)
    assert [values[0] for values in found] == [-0.375, 0.5625, 0.0625, 0.375, -0.1875, -0.4375]


def test_rae_is_the_reward_less_the_mean_of_its_role_before():
    batch, means = duels(), {"game/white": 0.5}
    found = of("rae", batch, means=means, decay=0.9)
    white, black = [0.5, 0.9 * 0.5 + 0.1], [0.0, -0.1]
    white.append(0.9 * white[1] - 0.1)
    black.append(0.9 * black[1] + 0.1)
    expected = [1 - white[0]] * 2 + [-1 - black[0]] + [1 - black[1]] * 2 + [-1 - white[1], 0.5 - black[2], -white[2]]
    assert [values[0] for values in found] == pytest.approx(expected, abs=1e-6)
    assert means == pytest.approx({"game/white": 0.9 * white[2], "game/black": 0.9 * black[2] + 0.05})
    last, means = [sequence("black", 1), sequence("black", 1, 2.0), sequence("white", 1, 1.0)], {}
    assert of("rae", expanded(last), means=means, decay=0.9) == [[1.0], [2.0], [2.0]]
    assert means == pytest.approx({"game/white": 0.1, "game/black": 0.2})
    again = {"game/white": 0.5}
    assert running_means(["game/white"], torch.tensor([1.0]), again, 0.9).tolist() == [0.5]


def test_a_rollouts_only_reward_is_every_roles():
    batch = expanded(
        [sequence("white", 2), sequence("black", 1, 1.0)], [sequence("white", 1), sequence("black", 1, 0.0)]
    )
    assert batch.batch["token_level_scores"].sum(dim=1).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert data_metrics(batch)["critic/score/mean"] == 0.5  # of the main sequence's role
    assert [values[0] for values in of("grpo", batch, norm_adv_by_std_in_grpo=False)] == [0.5, 0.5, -0.5, -0.5]


def test_a_rollouts_only_reward_is_every_roles_with_the_step_rewards_of_earlier_sequences():
    made = [sequence("white", 1), sequence("black", 1), sequence("black", 1, 1.0, [(1, "search", 0.5)])]
    for turn, each in enumerate(made):
        each.segments[0] = each.segments[0]._replace(turn=turn)
    batch = expanded(made)  # rows: black, white, black before it
    assert batch.batch["token_level_scores"].sum(dim=1).tolist() == [1.0, 1.5, 0.5]
    assert part_totals(batch, parts_of(batch)).tolist() == [1.5, 1.5]


def test_a_group_teaches_if_any_role_differs():
    same_for_black = (
        [sequence("white", 1, 1.0), sequence("black", 1, 0.0)],
        [sequence("white", 1, 0.0), sequence("black", 1, 0.0)],
    )
    equal = [[sequence("white", 1, 1.0), sequence("black", 1, 0.0)]] * 2
    batch = expanded(*same_for_black, *equal, uids=list("aabb"))
    assert spread_groups(batch) == [[0, 1, 2, 3]]
    assert spread_groups(batch, "score") == []


@pytest.mark.parametrize(
    ("white", "black", "differ"), [(1.0, 1.0, 1), (0.0, 0.0, 1), (0.0, 1.0, 0), (None, 0.0, 1), (None, 1.0, 0)]
)
def test_as_many_groups_are_counted_before_sequences_are_rows_as_are_found_after(white, black, differ):
    """Dynamic sampling counts them to see whether to roll out further prompts, and evicts those that teach nothing."""
    rollouts = [
        [sequence("white", 1, white), sequence("black", 1, black)],
        [sequence("white", 1, white and 0.0), sequence("black", 1, 1.0)],
        [sequence("white", 1, 1.0), sequence("black", 1, -1.0)],
        [sequence("white", 1, 1.0), sequence("black", 1, -1.0)],
        [sequence("black", 1), sequence("white", 1, 1.0)],
        [sequence("white", 1), sequence("black", 1, 1.0)],
    ]
    made, options = rolled(*rollouts, uids=list("aabbcc")), TrainOptions()
    found = spread_groups(expand_sequences(made, 0, RewardOptions()))
    assert count_spread(made, options) == len(found) == differ


GAME = """
async def run(client, row):
    said = {}
    for role in ("white", "black"):
        answer = await client.chat.completions.create(
            model="policy", messages=row["raw_prompt"], max_tokens=8, extra_headers={"X-Agent-Role": role}
        )
        said[role] = sum((answer.choices[0].message.content or "").count(vowel) for vowel in "aeiou")
    lead = max(-1.0, min(1.0, (said["white"] - said["black"]) / 2))
    return {"white": lead, "black": -lead}
"""


def test_a_game_against_itself_is_learned_verified_and_resumed_to_the_bit(tmp_path):
    tokenizer = build_tiny_tokenizer(["Say vowels."], 300)
    spec = TinyModelSpec(hidden_size=32, num_layers=1, intermediate_size=64, vocab_size=300)
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, tmp_path / "model")
    row = {"data_source": "game", "prompt": [{"role": "user", "content": "Say vowels."}], "reward_model": {}}
    write_parquet([row] * 4, tmp_path / "rows.parquet")
    (tmp_path / "game.py").write_text(GAME)

    def play(run, steps, *more):
        overrides = [
            f"data.train_files={tmp_path}/rows.parquet",
            "data.train_batch_size=4",
            "data.max_response_length=32",
            f"actor_rollout_ref.model.path={tmp_path}/model",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.agent.default_agent_loop=openai_agent",
            f"actor_rollout_ref.rollout.agent.openai_agent.function={tmp_path}/game.py:run",
            "actor_rollout_ref.rollout.agent.roles=[white,black]",
            "algorithm.adv_estimator=rae",
            "reward_model.enable=false",
            f"trainer.default_local_dir={tmp_path}/{run}",
            f"trainer.rollout_data_dir={tmp_path}/{run}/rollouts",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=4",
            "trainer.max_actor_ckpt_to_keep=-1",
            "trainer.deterministic=true",
            "trainer.logger=[jsonl]",
            "trainer.report=false",
            "trainer.num_threads=1",
            *more,
        ]
        train(compose("grpo_trainer", overrides))
        return tmp_path / run

    run = play("run", 16)

    def vowels(step):
        records = [each for record in read_rollouts(run / f"rollouts/{step}.jsonl") for each in sequences_of(record)]
        assert [each["role"] for each in records] == ["white", "black"] * 32
        return sum(each["output"].count(vowel) for each in records for vowel in "aeiou") / len(records)

    assert vowels(16) > 2 * vowels(1)
    figures = list(read_metrics(run / "metrics.jsonl"))
    for each in figures[1:]:
        assert each["role/white/score/mean"] == pytest.approx(-each["role/black/score/mean"])
    state = json.loads((run / "global_step_16/trainer.json").read_text())["role_means"]
    assert sorted(state) == ["game/black", "game/white"]
    assert figures[-1]["role/white/baseline"] == state["game/white"] != 0
    resumed = play("resumed", 8, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={run}/global_step_4")
    assert same(weights(run, 8), weights(resumed, 8))
    states = [json.loads((each / "global_step_8/trainer.json").read_text())["role_means"] for each in (run, resumed)]
    assert states[0] == states[1]
    verified = verify_step(run, 5)
    assert verified.first is None, verified.explain()
