"""Several sequences of one rollout in training: rows, credit, figures, dumps; numbers by hand, and runs of a real loop."""

import json
import statistics
from collections import Counter

import numpy as np
import pytest
import torch
from house_stage import ACTOR, ROLLOUT, metrics, same, steps, weights
from hypothesis import given
from hypothesis import strategies as st

from etude.agents import Rollout, to_batch
from etude.agents.batch import place_scores
from etude.algorithms import agg_loss
from etude.cli.main import cli
from etude.cli.main import run as run_command
from etude.distributed import BatchRef, InProcessWorkerGroup
from etude.distributed.plane import InProcessStore
from etude.dumps import read_rollouts, sequences_of
from etude.jsonl import json_line
from etude.models import load_causal_lm
from etude.options import RewardOptions
from etude.protocol import DataProto
from etude.trainer.group_filter import spread_groups
from etude.trainer.interrupts import Interrupts
from etude.trainer.metrics import data_metrics
from etude.trainer.minibatches import mini_rows
from etude.trainer.ppo import PPOTrainer
from etude.trainer.rollouts import MAIN_SEQUENCE, main_rows, rollouts_of, survivor_rows
from etude.trainer.run import train
from etude.trainer.sequences import expand_sequences, sequence_advantages, sequence_scores
from etude.trainer.setup import prepare
from etude.trajectory import Provenance, Rewards, Trajectory
from etude.viewer.explain import Verdict, check_overlap, check_sequence
from etude.workers import ActorRolloutRefWorker


def sequence(*runs, prompt=(1, 2), score=None, steps=(), first=0):
    """A trajectory of (provenance, length) runs; a sampled one is a turn."""
    made = Trajectory("r", list(prompt), rewards=Rewards(score=score, steps=list(steps)))
    made.first_turn = made.assistant_turns = first
    for kind, length in runs:
        sampled = kind == "s"
        provenance = Provenance.SAMPLED if sampled else Provenance.TOOL
        made.append([5 + i for i in range(length)], provenance, log_probs=[-0.5] * length if sampled else None)
        made.assistant_turns += sampled
    return made


def rollout(score, *runs, earlier=(), steps=()):
    return Rollout([*earlier, sequence(*runs, score=score, steps=steps)])


def rolled(results, uids):
    """A batch as the trainer has it after a rollout: scores placed, what was dropped gone."""
    batch = to_batch(results, 0)
    column = np.empty(len(uids), dtype=object)
    column[:] = uids
    batch.non_tensor_batch["uid"] = column
    place_scores(batch, RewardOptions())
    return batch.select_idxs(survivor_rows(batch, 0.0))


def example():
    """Two groups; the first rollout of `a` left two sequences behind, one of them with a prompt of its own."""
    one = sequence(("s", 2), ("t", 1), ("s", 3), prompt=(1, 2, 3))
    two = sequence(("s", 1), prompt=(9,))
    return [
        rollout(1.0, ("t", 1), ("s", 2), earlier=[one, two]),
        rollout(0.0, ("s", 4)),
        rollout(0.5, ("s", 1)),
        rollout(1.0, ("s", 2)),
        rollout(0.25, ("s", 2), earlier=[sequence(("s", 5))]),
    ], list("aaabb")


def without_earlier(results):
    return [Rollout([result.trajectory]) for result in results]


# -- rows --------------------------------------------------------------------------------------------------------


def test_each_earlier_sequence_is_a_row_after_its_rollouts_main_one():
    results, uids = example()
    plain = rolled(results, uids)
    batch = expand_sequences(plain, 0)
    assert batch.batch[MAIN_SEQUENCE].tolist() == [1, 0, 0, 1, 1, 1, 1, 0]
    assert batch.non_tensor_batch["uid"].tolist() == list("aaaaabbb")
    shown = [results[0].trajectory, *results[0].earlier, *(r.trajectory for r in results[1:]), *results[4].earlier]
    for row, trajectory in enumerate(shown):
        filled = batch.batch["attention_mask"][row].bool()
        assert batch.batch["input_ids"][row][filled].tolist() == trajectory.prompt_ids + trajectory.response_ids
        length = trajectory.response_length
        assert batch.batch["response_mask"][row, :length].tolist() == trajectory.response_mask
        assert not batch.batch["response_mask"][row, length:].any()
        assert batch.batch["rollout_log_probs"][row, :length].tolist() == trajectory.response_log_probs
        assert batch.batch["position_ids"][row][filled].tolist() == list(range(int(filled.sum())))
    assert rollouts_of(batch)[0] is rollouts_of(batch)[1] is rollouts_of(batch)[2] is results[0]
    assert float(batch.batch["token_level_scores"].sum()) == pytest.approx(2.75)  # every reward once
    assert len(plain) == 5  # the rollouts stay as they were


@pytest.mark.parametrize("seen", [("main",), ("earlier",), ("main", "earlier")])
def test_a_sequence_has_the_images_of_its_own_context(seen):
    result, other = rollout(1.0, ("s", 1), earlier=[sequence(("s", 1))]), rollout(0.0, ("s", 1))
    result.trajectory.images = ["main's"] * ("main" in seen)
    result.earlier[0].images = ["earlier's"] * ("earlier" in seen)
    batch = expand_sequences(rolled([result, other], "aa"), 0)
    shown = batch.non_tensor_batch["multi_modal_inputs"].tolist()
    assert shown == [("main's",) * ("main" in seen), ("earlier's",) * ("earlier" in seen), ()]


def test_a_batch_without_earlier_sequences_is_left_alone():
    results, uids = example()
    batch = rolled(without_earlier(results), uids)
    assert expand_sequences(batch, 0) is batch
    assert main_rows(batch).all()
    nothing = BatchRef.of(batch, InProcessStore())[:0].fetch()  # where no rollout of a step on Ray can be learned from
    assert expand_sequences(nothing, 0) is nothing


def test_a_sequence_in_which_nothing_was_sampled_teaches_nothing():
    results = [rollout(1.0, ("s", 2), earlier=[sequence(("t", 3))]), rollout(0.0, ("s", 2))]
    batch = rolled(results, "aa")
    assert expand_sequences(batch, 0) is batch


def test_a_dropped_rollout_and_one_without_a_sampled_answer_take_their_sequences_along():
    gone = Rollout([sequence(("s", 2)), sequence(("s", 2), score=1.0)])
    gone.drop(None)
    silent = rollout(1.0, ("t", 2), earlier=[sequence(("s", 2))])
    batch = expand_sequences(rolled([gone, silent, rollout(1.0, ("s", 1))], "aaa"), 0)
    assert len(batch) == 1


# -- credit ------------------------------------------------------------------------------------------------------


def advantages(name, batch, *, episodes, rewards=None, **options):
    rewards = sequence_scores(batch, episodes=episodes) if rewards is None else rewards
    return sequence_advantages(name, batch, rewards, **options)


def test_grpo_compares_rollouts_and_credits_every_sequence():
    results, uids = example()
    batch = expand_sequences(rolled(results, uids), 0)
    found, returns = advantages("grpo", batch, episodes=False)
    plain = rolled(without_earlier(results), uids)
    expected, _ = advantages("grpo", plain, episodes=False)
    main, width = main_rows(batch), expected.shape[1]
    assert torch.equal(found[main][:, :width], expected)  # mean and spread of the group are those of its rollouts
    mean, spread = 0.5, statistics.stdev([1.0, 0.0, 0.5])
    worth = {0: (1.0 - mean) / (spread + 1e-6), 7: (0.25 - 0.625) / (statistics.stdev([1.0, 0.25]) + 1e-6)}
    mask = batch.batch["response_mask"].bool()
    for rows, value in (((0, 1, 2), worth[0]), ((6, 7), worth[7])):
        for row in rows:
            assert found[row][mask[row]].double().numpy() == pytest.approx(value, abs=1e-6)
    assert not found[~mask].any()
    assert torch.equal(found, returns)


def test_a_turns_reward_is_credited_to_it_whichever_sequence_has_it():
    """It went to the last turn of the main sequence."""
    runs = (("s", 1), ("t", 1), ("s", 2), ("t", 1), ("s", 1))
    paid = [[(0, "tool", value), (1, "tool", 0.5), (2, "tool", 0.0)] for value in (1.0, 0.0)]
    whole = rolled([rollout(None, *runs, steps=steps) for steps in paid], "aa")
    apart = rolled([Rollout([sequence(*runs[:3]), sequence(*runs[4:], steps=steps, first=2)]) for steps in paid], "aa")
    apart = expand_sequences(apart, 0)
    for name, options in (("turn_grpo", {"gamma": 0.0}), ("grpo", {})):
        expected, found = (advantages(name, batch, episodes=False, **options)[0] for batch in (whole, apart))
        for number, main in ((0, 0), (1, 2)):
            earlier, mask = found[main + 1], apart.batch["response_mask"].bool()
            in_time = torch.cat([earlier[mask[main + 1]], found[main][mask[main]]])
            assert torch.equal(in_time, expected[number][whole.batch["response_mask"][number].bool()])
    assert sequence_scores(apart, episodes=True).sum(dim=1).tolist() == [1.5, 1.5, 0.5, 0.5]  # each ends in the total


def test_a_penalty_counts_once_wherever_in_the_rollout_it_arose():
    results, uids = example()
    batch = expand_sequences(rolled(results, uids), 0)
    mask = batch.batch["response_mask"]
    penalty = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    given = batch.batch["token_level_scores"] - penalty
    found, _ = advantages("grpo", batch, episodes=False, rewards=given)
    totals = [float(given[rows].double().sum()) for rows in ([0, 1, 2], [3], [4], [5], [6, 7])]
    first = int(mask[0].argmax())
    group = totals[:3]
    expected = (group[0] - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
    assert found[0, first].item() == found[1, 0].item() == pytest.approx(expected, abs=1e-5)
    batch.batch["token_level_rewards"] = given
    assert data_metrics(batch, 16)["critic/rewards/mean"] == pytest.approx(statistics.mean(totals), abs=1e-6)


def gae_by_hand(rewards, values, gamma, lam):
    """Advantages along the sampled tokens of one sequence, in float64 as Python has it."""
    found, following, advantage = [], 0.0, 0.0
    for reward, value in reversed(list(zip(rewards, values))):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        found.append(advantage)
    return found[::-1]


def test_gae_takes_each_sequence_for_an_episode_that_ends_in_the_rollouts_total():
    results = [
        rollout(1.0, ("s", 2), ("t", 1), ("s", 1), earlier=[sequence(("s", 3), ("t", 2))], steps=[(0, "t", 0.5)]),
        rollout(0.0, ("s", 2)),
    ]
    batch = expand_sequences(rolled(results, "ab"), 0)
    mask = batch.batch["response_mask"].bool()
    batch.batch["values"] = torch.rand(mask.shape, generator=torch.Generator().manual_seed(2))
    rewards = sequence_scores(batch, episodes=True)
    found, returns = advantages("gae", batch, episodes=True, gamma=0.9, lam=0.8, whiten=False)
    assert rewards[0].tolist() == [0.0, 0.5, 0.0, 1.0, 0.0]
    assert rewards[1].tolist() == [0.0, 0.0, 1.5, 0.0, 0.0]  # not on the tool's words after it
    for row, given_rewards in ((0, [0.0, 0.5, 1.0]), (1, [0.0, 0.0, 1.5]), (2, [0.0, 0.0])):
        values = batch.batch["values"][row][mask[row]].double().tolist()
        expected = gae_by_hand(given_rewards, values, 0.9, 0.8)
        assert found[row][mask[row]].tolist() == pytest.approx(expected, abs=1e-6)
        assert returns[row][mask[row]].tolist() == pytest.approx([a + v for a, v in zip(expected, values)], abs=1e-6)
    whitened, _ = advantages("gae", batch, episodes=True, gamma=0.9, lam=0.8)
    assert float(whitened[mask].double().mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(whitened[mask].double().std()) == pytest.approx(1.0, abs=1e-3)


_SEQUENCE = st.lists(st.tuples(st.sampled_from("st"), st.integers(1, 3)), min_size=1, max_size=4)
_ROLLOUT = st.tuples(
    st.sampled_from("abc"),
    st.floats(-1, 1, width=32),
    _SEQUENCE.map(lambda runs: [*runs, ("s", 1)]),
    st.lists(_SEQUENCE, max_size=3),
)


@given(rollouts=st.lists(_ROLLOUT, min_size=1, max_size=6), groups=st.integers(1, 4))
def test_whatever_the_rollouts_every_sampled_token_counts_once(rollouts, groups):
    results = [
        rollout(score, *runs, earlier=[sequence(*each, prompt=(3,) * (1 + i)) for i, each in enumerate(earlier)])
        for _, score, runs, earlier in rollouts
    ]
    uids = [uid for uid, *_ in rollouts]
    plain = rolled(results, uids)
    batch = expand_sequences(plain, 0)
    sampled = sum(sum(t.response_mask) for r in results for t in (*r.earlier, r.trajectory))
    mask = batch.batch["response_mask"]
    assert int(mask.sum()) == sampled
    alone, _ = advantages("grpo", plain, episodes=False)
    found, _ = advantages("grpo", batch, episodes=False)
    main = main_rows(batch)
    assert torch.equal(found[main][:, : alone.shape[1]], alone)
    assert not found[mask == 0].any()
    loss = float(agg_loss(-found.double(), mask, "token-mean"))
    by_hand = -sum(
        float(alone[row].double().sum()) / sum(result.trajectory.response_mask) * sampled_in(result)
        for row, result in enumerate(results)
    )
    assert loss == pytest.approx(by_hand / sampled, abs=1e-5)
    minis = [batch.select_idxs(rows) for rows in mini_rows(batch, groups, shuffle=True, seed=(1,))]
    assert sum(len(mini) for mini in minis) == len(batch)
    homes = Counter(id(r) for mini in minis for r in {id(r): r for r in rollouts_of(mini)}.values())
    assert set(homes.values()) == {1}  # a rollout's rows are in one mini-batch
    assert [sorted(set(batch.non_tensor_batch["uid"][rows])) for rows in spread_groups(batch)] == [
        sorted(set(plain.non_tensor_batch["uid"][rows])) for rows in spread_groups(plain)
    ]


def sampled_in(result):
    return sum(sum(t.response_mask) for t in (*result.earlier, result.trajectory))


def test_figures_count_rollouts_and_tokens_of_all_sequences():
    results, uids = example()
    plain, batch = rolled(results, uids), expand_sequences(rolled(results, uids), 0)
    for each in (plain, batch):
        each.batch["advantages"], _ = advantages("grpo", each, episodes=False)
    ours, theirs = data_metrics(batch, 16), data_metrics(plain, 16)
    for name in theirs:
        if "score" in name:
            assert ours[name] == theirs[name]
    sequences = [each for result in results for each in (*result.earlier, result.trajectory) if any(each.response_mask)]
    lengths = [len(each.response_ids) for each in sequences]
    assert ours["response_length/mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert (ours["response_length/max"], ours["response_length/min"]) == (max(lengths), min(lengths))
    assert ours["prompt_length/max"] == max(len(each.prompt_ids) for each in sequences)
    mask = batch.batch["response_mask"].bool()
    expected = float(batch.batch["advantages"][mask].double().mean())
    assert ours["critic/advantages/mean"] == pytest.approx(expected)
    assert ours["critic/advantages/mean"] != pytest.approx(theirs["critic/advantages/mean"])


# -- runs --------------------------------------------------------------------------------------------------------

LOOPS = '''
"""Loops that answer, forget what was said, and answer again."""

from etude.agents import AgentLoopBase, register
from etude.trajectory import Provenance, Trajectory


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 16  # differs from answer to answer


async def answered(loop, messages, sampling_params, request_id):
    prompt = loop.chat.initial_ids(messages)
    made = Trajectory(request_id, prompt, messages=messages)
    params = dict(sampling_params, max_tokens=12)
    drawn = await loop.server_manager.generate(prompt_ids=prompt, sampling_params=params)
    made.append(
        drawn.token_ids, Provenance.SAMPLED, log_probs=drawn.log_probs, weight_versions=drawn.weight_versions
    )
    made.assistant_turns = 1
    return made


@register("trainer_forgetful")
class Forgetful(AgentLoopBase):
    sequences = 2

    async def run(self, sampling_params, **row):
        outputs = []
        for number in range(1 + (row["rollout_index"] + 1) % self.sequences):
            messages = [*row["raw_prompt"][number == 0 :], {"role": "assistant", "content": f"Note {number}."}][-2:]
            messages = messages if number else list(row["raw_prompt"])
            outputs.append((await answered(self, messages, sampling_params, row["request_id"])).to_output())
        return outputs


@register("trainer_listed")
class Listed(Forgetful):
    sequences = 1


@register("trainer_single")
class Single(AgentLoopBase):
    async def run(self, sampling_params, **row):
        return (await answered(self, list(row["raw_prompt"]), sampling_params, row["request_id"])).to_output()
'''
SAVES = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null", "trainer.total_training_steps=3")


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    path = tmp_path_factory.mktemp("loops") / "loops.py"
    path.write_text(LOOPS)
    return path


@pytest.fixture(scope="module")
def configured(tiny, loops):
    """A configuration of a run in which every second rollout leaves a sequence behind."""

    def make(folder, *overrides, loop="forgetful"):
        plugins = f"plugins=[{tiny.folder}/agent.py,{loops}]"
        chosen = (f"{ROLLOUT}.agent.default_agent_loop=trainer_{loop}", f"custom_reward_function.path={loops}")
        return tiny.config(folder, plugins, *chosen, *overrides)

    return make


@pytest.fixture(scope="module")
def run_dir(configured, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequences") / "run"
    train(configured(folder, *SAVES))
    return folder


def ready(config):
    trainer = PPOTrainer(*prepare(config))
    trainer.init_workers()
    return trainer


def step(trainer):
    """(figures, the batch that the actor learned from, with its rollouts) of one step."""
    learned, update, expand, rolled = [], trainer._update_actor, trainer._expand, {}

    def expanded(taken):
        batch = expand(taken)
        for uid, rollout in zip(batch.non_tensor_batch["uid"], rollouts_of(batch)):
            rolled.setdefault(uid, []).append(rollout)
        return batch

    def updated(data):
        rollouts = [each for uid in dict.fromkeys(data.non_tensor_batch["uid"]) for each in rolled[uid]]
        learned.append(data.select().union(DataProto.from_dict(non_tensors={"rollout": rollouts})))
        return update(data)

    trainer._update_actor, trainer._expand = updated, expanded
    figures = trainer.training_step(Interrupts(lambda text: None))
    trainer._update_actor, trainer._expand = update, expand
    return figures, learned


def test_a_run_counts_its_sequences_and_dumps_one_line_a_rollout(run_dir):
    assert [record["rollout/sequences/mean"] for record in metrics(run_dir)] == [1.5] * 3
    for number in (1, 2, 3):
        records = list(read_rollouts(run_dir / "rollouts" / f"{number}.jsonl"))
        assert [len(record["earlier"]) for record in records] == [1, 0] * 4
        model = run_dir / f"global_step_{number - 1}" / "actor" / "huggingface"
        for record in records:
            for sequence in sequences_of(record):
                checks = check_sequence(sequence, model if number > 1 else None)
                assert len(checks) == 5 if sequence is record else 4
                assert {check.verdict for check in checks[: None if number > 1 else -1]} == {Verdict.HOLDS}, checks
            assert all(s["weight_versions"] for e in sequences_of(record) for s in e["segments"])
            claims = check_overlap(record)
            assert claims is None if not record["earlier"] else claims.verdict is Verdict.HOLDS


def test_two_runs_and_a_resumed_one_end_bit_identical(configured, run_dir, tmp_path):
    train(configured(tmp_path, *SAVES, "trainer.total_training_steps=2"))
    assert same(weights(tmp_path, 2), weights(run_dir, 2))
    train(configured(tmp_path, *SAVES))
    assert steps(tmp_path) == [1, 2, 3]
    assert same(weights(tmp_path, 3), weights(run_dir, 3))


def test_a_list_of_one_trains_as_the_output_itself(configured, tmp_path):
    for loop in ("listed", "single"):
        train(configured(tmp_path / loop, "trainer.total_training_steps=2", loop=loop))
    assert same(weights(tmp_path / "listed", 2), weights(tmp_path / "single", 2))
    assert metrics(tmp_path / "single")[0]["rollout/sequences/mean"] == 1.0


def test_the_gradient_is_that_of_every_sampled_token_once(tiny, configured, tmp_path):
    """Against a forward pass a sequence, without packing, in double precision."""
    figures, (learned,) = step(ready(configured(tmp_path)))
    network = load_causal_lm(tiny.model).double().eval()
    total, tokens = 0.0, 0
    groups = {}
    for uid, result, main in zip(learned.non_tensor_batch["uid"], rollouts_of(learned), main_rows(learned)):
        groups.setdefault(uid, []).extend([result] if main else [])
    assert sorted(map(len, groups.values())) == [4, 4]
    for group in groups.values():
        scores = [result.trajectory.rewards.total() for result in group]
        spread = statistics.stdev(scores)
        for result, score in zip(group, scores):
            worth = (score - statistics.mean(scores)) / (spread + 1e-6) if spread else 0.0
            for each in (*result.earlier, result.trajectory):
                ids = torch.tensor([each.prompt_ids + each.response_ids])
                logits = network(input_ids=ids).logits[0, len(each.prompt_ids) - 1 : -1]
                chosen = logits.log_softmax(-1).gather(1, ids[0, len(each.prompt_ids) :, None]).squeeze(1)
                mask = torch.tensor(each.response_mask)
                total = total - worth * (chosen * mask).sum()
                tokens += int(mask.sum())
    (total / tokens).backward()
    norm = float(torch.stack([p.grad.norm() for p in network.parameters() if p.grad is not None]).norm())
    assert norm > 0
    assert figures["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert int(learned.batch["response_mask"].sum()) == tokens


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=true",
            f"{ACTOR}.ppo_mini_batch_size=1",
            "critic.optim.lr=1e-2",
            "critic.optim.lr_warmup_steps=0",
        ),
        ("algorithm.rollout_correction.bypass_mode=true", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.ppo_epochs=2"),
        ("algorithm.use_kl_in_reward=true", f"{ROLLOUT}.mode=sync"),
    ],
    ids=["critic", "bypass", "kl"],
)
def test_every_column_is_there_for_every_sequence(configured, tmp_path, overrides):
    trainer = ready(configured(tmp_path, *overrides))
    step(trainer)
    figures, (learned,) = step(trainer)
    columns = learned.batch
    assert columns[MAIN_SEQUENCE].tolist() == [1, 0, 1] * 4
    mask = columns["response_mask"].bool()
    assert mask.any(dim=1).all()
    for name in ("old_log_probs", "ref_log_prob", "values"):
        if name in columns:
            assert columns[name][mask].abs().gt(0).all(), name
    assert "ref_log_prob" in columns
    assert "old_log_probs" in columns or "mode=sync" in overrides[-1]
    if trainer.groups.critic is not None:
        assert figures["critic/vf_loss"] > 0
        assert columns["returns"][mask].abs().sum(dim=0).gt(0).all()
    assert all(np.isfinite(value) for value in figures.values())
    gap = (columns.get("old_log_probs", columns["rollout_log_probs"]) - columns["rollout_log_probs"])[mask]
    assert float(gap.abs().max()) < 1e-4


def test_ranks_share_the_rows_of_sequences_with_padding(configured, tmp_path):
    trainer = ready(configured(tmp_path))
    _, (learned,) = step(trainer)
    one, three = (InProcessWorkerGroup(ActorRolloutRefWorker, size, trainer.options) for size in (1, 3))
    for group in (one, three):
        group.init_model()
    batch = learned.select_idxs(list(range(11)))  # 4 + 4 + 3 rows
    alone, shared = (group.compute_log_prob(batch).batch["old_log_probs"] for group in (one, three))
    assert torch.allclose(alone, shared, atol=1e-5)


def test_groups_are_filtered_by_their_rollouts_and_keep_their_sequences(configured, tmp_path):
    trainer = ready(
        configured(tmp_path, "algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2")
    )
    for _ in range(3):
        figures, learned = step(trainer)
        for batch in learned:
            kept = main_rows(batch)
            assert len(set(batch.non_tensor_batch["uid"].tolist())) <= 2
            assert figures["training/filter_groups/kept"] <= 1
            assert int(kept.sum()) in (4, 8)
            rows = [len(result.earlier) + 1 for result in {id(r): r for r in rollouts_of(batch)}.values()]
            assert len(batch) == sum(rows) > int(kept.sum())


def test_explain_shows_and_verifies_every_sequence(run_dir, tmp_path, capsys):
    dump = run_dir / "rollouts" / "2.jsonl"
    assert run_command(cli, ["explain", str(dump), "--row", "2"]) == 0
    shown = capsys.readouterr().out
    assert "sequence 0 of 2 (earlier)" in shown
    assert "sequence 1 of 2 (main)" in shown
    assert shown.count("✓ a full forward pass gives the engine's log-probs") == 2
    assert shown.count("✓ the rewards on the tokens add up to the score") == 1
    assert "✓ no sampled token is in two sequences" in shown
    assert run_command(cli, ["explain", str(dump), "--row", "1"]) == 0
    assert "sequence 0" not in capsys.readouterr().out
    record = json.loads(json.dumps(list(read_rollouts(dump))[2]))
    record["earlier"][0]["segments"][0]["log_probs"][0] -= 1.0
    doctored = tmp_path / "2.jsonl"
    doctored.write_bytes(json_line(record))
    model = run_dir / "global_step_1" / "actor" / "huggingface"
    assert run_command(cli, ["explain", str(doctored), "--model", str(model)]) == 1
    assert "✗ a full forward pass" in capsys.readouterr().out


def test_sequences_that_hold_the_same_draw_are_told():
    twice = sequence(("s", 3), prompt=(1, 2))
    record = twice.to_record() | {"earlier": [twice.to_record()]}
    check = check_overlap(json.loads(json_line(record)))
    assert check.verdict is Verdict.SKIPPED
    assert "sequences 0 and 1 hold the same 3 sampled tokens" in check.evidence
