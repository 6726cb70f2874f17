"""Credit for rollouts however many sequences they left, and the columns that are read off rollouts for it."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from house_stage import metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agents import Rollout, to_batch
from etude.agents.batch import place_scores
from etude.algorithms import ADVANTAGE_ESTIMATORS
from etude.dumps import read_rollouts
from etude.errors import ConfigError, DataError
from etude.options import RewardOptions
from etude.protocol import DataProto, object_array
from etude.trainer.accounting import account, list_rollouts
from etude.trainer.columns import observations, read_column, reward_components, turn_numbers
from etude.trainer.run import train
from etude.trainer.sequences import expand_sequences, sequence_advantages, sequence_scores
from etude.trajectory import Provenance, Rewards, StopReason, Trajectory

OWN = {"gdpo": {"gdpo_reward_keys": ("step", "score", "format")}}
JUDGES = [name for name in ADVANTAGE_ESTIMATORS.names() if not ADVANTAGE_ESTIMATORS.get(name).episodes]


def sequence(prompt, runs):
    """Runs of (is sampled, ids); a sampled one is a turn."""
    made = Trajectory("r", list(prompt))
    for sampled, ids in runs:
        made.append(
            ids, Provenance.SAMPLED if sampled else Provenance.TOOL, log_probs=[-1.0] * len(ids) if sampled else None
        )
        made.assistant_turns += sampled
    return made


def batch_of(drawn, cuts):
    """Rollouts of (uid, score, lengths of turns, turns with a step reward); each is cut before the turns in its `cuts`."""
    results, token = [], 1
    for (_, score, lengths, paid), cut in zip(drawn, cuts):
        runs = []
        for length in lengths:
            runs += [(True, list(range(token, token + length))), (False, [token + length])]
            token += length + 1
        runs.pop()
        starts = [0, *(2 * turn for turn in sorted(cut) if turn < len(lengths)), len(runs)]
        parts = [runs[a:b] for a, b in itertools.pairwise(starts) if a < b]
        sequences = [sequence([0], part) for part in parts]
        before = sum(s.assistant_turns for s in sequences[:-1])
        steps = [(turn - before, "tool", 0.5) for turn in paid if before <= turn < len(lengths)]
        sequences[-1].rewards = Rewards(steps=steps, score=score, score_info={"format": score**2})
        results.append(Rollout(sequences))
    batch = to_batch(results, 0)
    uids = [uid for uid, *_ in drawn]
    batch.non_tensor_batch |= {
        "uid": object_array(uids),
        "reward_baselines": object_array([{"a": 0.25, "b": 1.0, "c": 0.0}[uid] for uid in uids]),
    }
    place_scores(batch, RewardOptions())
    batch = expand_sequences(batch, 0)
    table = torch.rand(token, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch.batch["old_log_probs"] = table.log()[batch.batch["responses"]].clamp(min=-9)
    batch.batch["sum_pi_squared"] = table[batch.batch["responses"]] ** 2
    batch.batch["observations"] = torch.zeros_like(batch.batch["responses"])
    return batch


def by_token(batch, columns):
    mask = batch.batch["response_mask"].bool()
    return [dict(zip(batch.batch["responses"][mask].tolist(), column[mask].tolist())) for column in columns]


_DRAWN = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from([0.0, 0.5, 1.25]),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.booleans(),
)


@pytest.mark.parametrize("name", JUDGES)
@settings(max_examples=25)
@given(drawn=st.lists(_DRAWN, min_size=1, max_size=6), seed=st.integers(0, 99))
def test_it_makes_no_difference_into_how_many_sequences_a_rollout_was_cut(name, drawn, seed):
    dice = np.random.default_rng(seed)
    drawn = [(uid, score, lengths, [len(lengths) - 1] * paid) for uid, score, lengths, paid in drawn]
    cuts = [{int(turn) for turn in dice.integers(1, 5, dice.integers(0, 3))} for _ in drawn]
    options = {"gamma": 0.9} if ADVANTAGE_ESTIMATORS.reads(name, "gamma") else {}
    options |= OWN.get(name, {})
    found = []
    for chosen in (cuts, [set() for _ in drawn]):
        batch = batch_of(drawn, chosen)
        columns = sequence_advantages(name, batch, sequence_scores(batch, episodes=False), **options)
        assert not any(bool(column[batch.batch["response_mask"] == 0].any()) for column in columns)
        found.append(by_token(batch, columns))
    for cut, whole in zip(*found):
        assert cut == pytest.approx(whole, rel=1e-9, abs=1e-9)


def test_turns_of_later_sequences_come_later():
    batch = batch_of([("a", 1.0, [2, 1, 1], []), ("a", 0.0, [1], [])], [{1, 2}, set()])
    turns = by_token(batch, [read_column(batch, "turns")])[0]
    ids = sorted(turns)[:4]
    assert [turns[i] for i in ids] == sorted(turns[i] for i in ids)
    assert len({turns[i] for i in ids}) == 3
    assert turn_numbers(sequence([0], [(True, [1, 2]), (False, [3]), (True, [4])])) == [0, 0, 1, 1]


def test_observations_are_equal_where_what_was_answered_is():
    seen, again = (False, [3]), (True, [4])
    made = sequence([7, 8], [(True, [1, 2]), seen, again, seen, (True, [5, 6]), (False, [9]), (True, [2])])
    other = sequence([7, 8], [seen, (True, [1])])
    one, two, three, four = (observations(made)[place] for place in (0, 3, 5, 8))
    assert two == three
    assert len({one, two, four, observations(other)[1]}) == 4
    assert observations(sequence([7, 8], [(True, [9])])) == [one]
    assert observations(made)[:2] == [one, one]


def test_observations_with_images_are_refused():
    made = sequence([1], [(True, [1]), (False, [2]), (True, [3])])
    made.images = ["a picture"]
    with pytest.raises(DataError, match="rollout of several turns has images"):
        observations(made)


def test_components_are_the_sources_and_what_the_scorer_returned():
    one, two = sequence([0], [(True, [1])]), sequence([0], [(True, [2])])
    one.rewards = Rewards(
        [(0, "t", 0.5), (0, "t", 0.25)], {"saw": 2.0}, 1.5, {"format": True, "note": "text", "acc": 0.5}
    )
    two.rewards = Rewards(score=0.0, score_info={"acc": 1})
    found = reward_components([Rollout([one]), Rollout([two])])
    assert found.keys() == {"step", "final", "score", "format", "acc"}
    assert (found["step"].tolist(), found["final"].tolist()) == ([0.75, 0.0], [2.0, 0.0])
    assert (found["score"].tolist(), found["acc"].tolist()) == ([1.5, 0.0], [0.5, 1.0])
    assert found["format"].isnan().tolist() == [False, True]
    one.rewards.score_info["step"] = 9
    with pytest.raises(ConfigError, match="a number called 'step', as the sum of the tools' rewards is"):
        reward_components([Rollout([one])])
    batch = batch_of([("a", 1.0, [1], []), ("a", 0.0, [1], [])], [set(), set()])
    scores = sequence_scores(batch, episodes=False)
    with pytest.raises(ConfigError, match="scored without 'fromat'; did you mean 'format'"):
        sequence_advantages("gdpo", batch, scores, gdpo_reward_keys=["fromat"])


def test_an_infinite_component_is_refused_by_name():
    batch = batch_of([("a", 1.0, [1], []), ("a", 0.0, [1], [])], [set(), set()])
    scores = sequence_scores(batch, episodes=False)
    for rollout, value in zip(batch.non_tensor_batch["rollout"], (math.inf, 1.0)):
        rollout.trajectory.rewards.score_info["form"] = value
    with pytest.raises(ConfigError, match="'form' is infinite"):
        sequence_advantages("gdpo", batch, scores, gdpo_reward_keys=["form"])


@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_a_rollout_whose_component_is_not_finite_is_dropped_and_its_group_learns(tiny, tmp_path, bad):
    scores = SCORES.replace("even % 3", f"even % 3 if len(solution_str) % 4 else float('{bad}')")
    (tmp_path / "scores.py").write_text(scores)
    run = (f"custom_reward_function.path={tmp_path}/scores.py", "trainer.total_training_steps=1")
    limits = ("actor_rollout_ref.rollout.infrastructure_retries=0", "trainer.min_valid_fraction=0.1")
    gdpo = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[even,length]")
    train(tiny.config(tmp_path, *gdpo, *run, *limits))
    (figures,) = (record for record in metrics(tmp_path) if record["step"] == 1)
    assert figures["rollout/dropped"] > 0
    assert math.isfinite(figures["critic/advantages/max"])
    assert figures["actor/grad_norm"] > 0


SCORES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    even = sum(solution_str.count(digit) for digit in "02468")
    return {"score": even / 8, "even": even % 3, "length": len(solution_str) / 100}
"""


def test_components_of_the_scorers_dict_reach_the_estimator(tiny, tmp_path):
    (tmp_path / "scores.py").write_text(SCORES)
    keys = ("algorithm.gdpo_reward_keys=[even,length]", "algorithm.gdpo_reward_weights=[1,0.5]")
    run = (f"custom_reward_function.path={tmp_path}/scores.py", "trainer.total_training_steps=1")
    train(tiny.config(tmp_path, "algorithm.adv_estimator=gdpo", *keys, *run))
    (figures,) = (record for record in metrics(tmp_path) if record["step"] == 1)
    groups, worth, tokens = {}, [], []
    for record in read_rollouts(tmp_path / "rollouts" / "1.jsonl"):
        groups.setdefault(record["uid"], []).append(record)
    for group in groups.values():
        parts = torch.tensor([[each["rewards"]["score_info"][key] for key in ("even", "length")] for each in group])
        centred = (parts - parts.mean(dim=0)) / (parts.std(dim=0) + 1e-6)
        worth += (centred * torch.tensor([1.0, 0.5])).sum(dim=1).tolist()
        tokens += [sum(len(s["token_ids"]) for s in each["segments"] if s["provenance"] == "sampled") for each in group]
    every = torch.tensor(worth).repeat_interleave(torch.tensor(tokens))
    assert float(every.std()) > 0.1
    white = (every - every.mean()) / every.std()
    assert figures["critic/advantages/max"] == pytest.approx(float(white.max()), abs=1e-3)
    assert figures["critic/advantages/min"] == pytest.approx(float(white.min()), abs=1e-3)


def test_a_prompt_whose_greedy_rollout_was_dropped_says_so():
    """It was left out of the step as `nothing_sampled`, though each of its rollouts had sampled."""
    whole, lost = SimpleNamespace(dropped=None), SimpleNamespace(dropped=StopReason.INFRASTRUCTURE)
    columns = {
        "rollout": object_array([whole, whole, whole, lost]),
        "uid": object_array(["a", "a", "b", "c"]),
        "reward_baselines": object_array([1.0, 1.0, None, 0.0]),
    }
    record = account(list_rollouts(DataProto.from_dict(non_tensors=columns)), {"a"}, {"a"}, ())
    assert record["trained"] == [["a", None]]
    assert record["dropped"] == {"no_baseline": [["b", None]], "infrastructure": [["c", None]]}
