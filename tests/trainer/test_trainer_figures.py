"""What a training step reports and when it refuses: rates, counts over refills, weights of means, scores, skipped steps."""

import dataclasses
import json
import math
import re
import runpy

import numpy as np
import pytest
import torch
from house_stage import ACTOR, ROLLOUT, metrics, same, steps, weights
from safetensors.torch import load_file
from test_trainer_training import quiet, ready
from trainer_tools import Moody

from etude.agents import Rollout, to_batch
from etude.agents.batch import concat_batches, place_scores
from etude.algorithms import compute_advantage
from etude.cli.main import cli
from etude.cli.main import run as run_command
from etude.cli.new import write_agent
from etude.errors import ConfigError, DataError, TrainingStopped
from etude.options import RewardOptions
from etude.trainer.group_filter import spread_groups
from etude.trainer.learning_signal import EmptySteps
from etude.trainer.metrics import SkippedSteps
from etude.trainer.rollouts import metrics_of_validation, rollouts_of
from etude.trainer.run import train
from etude.trainer.setup import prepare
from etude.trainer.validation_metrics import Sample, validation_metrics
from etude.trajectory import Provenance, Rewards, Trajectory

LINEAR = (f"{ACTOR}.optim.lr_scheduler_type=linear", f"{ACTOR}.optim.lr=1e-3")


# -- rates -------------------------------------------------------------------------------------------------------


def test_the_rate_follows_the_training_steps_whatever_was_updated_in_them(tiny, tmp_path):
    """Groups without spread are left out, so that steps take none, one or two updates."""
    several = (f"{ACTOR}.ppo_mini_batch_size=1", "algorithm.filter_groups.enable=true")
    train(tiny.config(tmp_path, *LINEAR, *several, f"{ACTOR}.optim.lr_warmup_steps=2"))
    records = [record for record in metrics(tmp_path) if "actor/lr" in record]
    factors = {1: 1 / 2, 2: 1, 3: 1, 4: 3 / 4, 5: 2 / 4, 6: 1 / 4}
    assert len(records) >= 3
    for record in records:
        assert record["actor/lr"] == pytest.approx(1e-3 * factors[record["step"]])
        assert record["actor/optimizer_steps"] in (1, 2)
    assert {record["actor/optimizer_steps"] for record in records} == {1, 2} or len(records) < 6


def test_an_actor_that_waits_for_its_critic_has_its_whole_schedule_afterwards(tiny, tmp_path):
    critic = ("algorithm.adv_estimator=gae", "trainer.critic_warmup=2", "trainer.total_training_steps=5")
    train(tiny.config(tmp_path, *LINEAR, *critic, "critic.optim.lr_scheduler_type=linear", "critic.optim.lr=1e-3"))
    records = metrics(tmp_path)
    assert [record.get("actor/lr") for record in records] == [
        None,
        None,
        *(pytest.approx(1e-3 * i / 3) for i in (3, 2, 1)),
    ]
    assert [record["critic/lr"] for record in records] == [pytest.approx(1e-3 * i / 5) for i in (5, 4, 3, 2, 1)]


# -- sums and counts ---------------------------------------------------------------------------------------------


def test_refilled_batches_are_counted_together(tiny, tmp_path):
    (tmp_path / "flat.py").write_text("def compute_score(**kwargs):\n    return 1.0\n")
    trainer = ready(
        tiny,
        tmp_path,
        f"custom_reward_function.path={tmp_path}/flat.py",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=3",
    )
    rolled, generate = [], trainer.rollouts.generate
    trainer.rollouts.generate = lambda prompts: (found := generate(prompts), rolled.append(found[0]))[0]
    figures = trainer.training_step(quiet())
    assert len(rolled) == 3
    trajectories = [result.trajectory for batch in rolled for result in rollouts_of(batch)]
    calls = sum(call.name == "calculator" for trajectory in trajectories for call in trajectory.tool_calls)
    assert figures["tool/calculator/calls"] == calls > 8
    assert figures["engine/sampled_tokens"] == sum(sum(trajectory.response_mask) for trajectory in trajectories)
    turns = [trajectory.num_turns for trajectory in trajectories]
    assert figures["num_turns/mean"] == pytest.approx(np.mean(turns))
    assert figures["num_turns/max"] == max(turns)


# -- scores ------------------------------------------------------------------------------------------------------


def scored(*rewards):
    """A batch of one group whose rollouts have ten turns of one token each."""
    results = []
    for each in rewards:
        trajectory = Trajectory("r", [1, 2], rewards=each)
        for _ in range(10):
            trajectory.assistant_turns += 1
            trajectory.append([5], Provenance.SAMPLED, log_probs=[-0.5])
        results.append(Rollout([trajectory]))
    batch = to_batch(results, 0)
    for name, values in (("uid", ["g"] * len(results)), ("data_source", ["mine"] * len(results))):
        batch.non_tensor_batch[name] = np.array(values, dtype=object)
    return batch


def tenths():
    return Rewards(steps=[(turn, "tool", 1.1) for turn in range(1, 11)])


def test_an_answer_without_a_token_counts_in_validation_with_its_reward():
    batch = scored(Rewards(score=1.0))
    silent = Rollout([Trajectory("r", [1, 2], rewards=Rewards(score=-1.0))])
    added = to_batch([silent], 0)
    added.non_tensor_batch |= batch.non_tensor_batch | {"rollout": added.non_tensor_batch["rollout"]}
    whole = concat_batches([batch, added])
    place_scores(whole, RewardOptions())
    found = metrics_of_validation(whole, RewardOptions())
    assert found["val-core/mine/reward/mean@2"] == found["val/reward/total/mean"] == 0.0


def advantages(batch):
    found, _ = compute_advantage(
        "grpo",
        token_level_rewards=batch.batch["token_level_scores"],
        response_mask=batch.batch["response_mask"],
        index=batch.non_tensor_batch["uid"],
    )
    return found[:, 0].tolist()


def test_equal_totals_are_equal_in_whatever_portions_they_came():
    assert sum([1.1] * 10) != 11.0
    batch = scored(tenths(), tenths(), Rewards(final={"tool": 11.0}), Rewards(score=11.0))
    place_scores(batch, RewardOptions())
    assert batch.batch["token_level_scores"].dtype == torch.float64
    assert advantages(batch) == [0.0] * 4
    assert spread_groups(batch) == []


def test_small_differences_of_large_scores_are_seen():
    batch = scored(*(Rewards(score=1e6 + 0.25 * i) for i in range(3)))  # float32 would round them to multiples of 1/16
    place_scores(batch, RewardOptions())
    assert advantages(batch) == pytest.approx([-1, 0, 1], rel=1e-5)
    assert spread_groups(batch) == [[0, 1, 2]]


@pytest.mark.parametrize(
    "wrong",
    [Rewards(score=1e300), Rewards(final={"tool": float("inf")}), Rewards(steps=[(1, "tool", float("nan"))])],
)
def test_a_reward_that_nothing_can_be_computed_with_names_its_row(wrong):
    with pytest.raises(
        DataError, match=r"row \{'data_source': 'mine', 'uid': 'g'\}: rewards must be finite and at most 1e\+30"
    ):
        place_scores(scored(Rewards(score=1.0), wrong), RewardOptions())


# -- validation --------------------------------------------------------------------------------------------------


def test_missing_samples_keep_the_name_and_are_counted():
    right, wrong, half = (Sample(score, score, 0.0) for score in (1.0, 0.0, 0.5))
    found = validation_metrics({"a": [[right, None], [wrong, half], [None, None]]})
    assert found["val-core/a/reward/mean@2"] == pytest.approx((1 + 0.25) / 2)
    assert found["val-core/a/reward/missing"] == 3
    assert "val-core/a/reward/mean@1" not in found
    assert validation_metrics({"a": [[None]]}) == {"val-core/a/reward/missing": 1}


def test_a_validation_that_lost_samples_says_so(tiny, tmp_path):
    tool = Moody(tmp_path / "tool", "raise ConnectionError('down')", good=0)
    trainer = ready(
        tiny,
        tmp_path,
        tool.override,
        f"data.val_files={tiny.folder}/data/train.parquet",
        f"{ROLLOUT}.infrastructure_retries=0",
        f"{ROLLOUT}.val_kwargs.n=4",
        f"{ROLLOUT}.val_kwargs.do_sample=true",
        f"{ROLLOUT}.val_kwargs.temperature=1.0",
    )
    batch, figures = trainer.rollouts.validate(trainer.val_set)
    missing = sum(result.trajectory is None for result in rollouts_of(batch))
    assert 0 < missing == figures["val-core/etude/arithmetic/reward/missing"] == figures["val/rollout/dropped"]
    assert "val-core/etude/arithmetic/reward/mean@3" not in figures
    assert missing < len(batch)
    assert "val-core/etude/arithmetic/reward/mean@4" in figures


def test_how_validation_is_cut_into_batches_changes_no_draw(tiny, tmp_path):
    sampled = (
        f"{ROLLOUT}.val_kwargs.n=2",
        f"{ROLLOUT}.val_kwargs.do_sample=true",
        f"{ROLLOUT}.val_kwargs.temperature=5.0",  # so hot that no two draws are alike by themselves
    )
    trainer = ready(tiny, tmp_path, f"data.val_files={tiny.folder}/data/val.parquet", *sampled)
    drawn = []
    for size in (None, 1, 2):
        data = dataclasses.replace(trainer.options.data, val_batch_size=size)
        trainer.rollouts._options = dataclasses.replace(trainer.options, data=data)
        batch = trainer.rollouts.validation(trainer.val_set)
        answers = [tuple(result.trajectory.response_ids) for result in rollouts_of(batch)]
        drawn.append(list(zip(batch.non_tensor_batch["uid"].tolist(), answers)))
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(answers)) == len(answers)
    assert len({uid for uid, _ in drawn[0]}) == len(trainer.val_set)


# -- what is refused, and what ends a run ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kl", "k1"])
def test_a_kl_loss_without_gradient_is_refused(tiny, tmp_path, kind):
    with pytest.raises(ConfigError, match=rf"kl_loss_type must be one of .*; did you mean '{re.escape(kind)}\+'"):
        prepare(tiny.config(tmp_path, f"{ACTOR}.kl_loss_type={kind}"))


def test_a_run_without_a_token_to_train_on_stops_and_can_go_on(tiny, tmp_path, capsys):
    (tmp_path / "flat.py").write_text("def compute_score(**kwargs):\n    return 1.0\n")
    run = tmp_path / "run"
    arguments = tiny.arguments(
        run, f"custom_reward_function.path={tmp_path}/flat.py", "algorithm.filter_groups.enable=true"
    )
    assert run_command(cli, ["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert "no token was trained on in the last 3 training steps: all rewards equal (1)" in error
    assert steps(run) == [1, 2, 3]
    assert (run / "global_step_3").is_dir()
    spread = f"custom_reward_function.path={tiny.folder}/agent.py"
    assert run_command(cli, ["train", *arguments, spread, "trainer.total_training_steps=4"]) == 0
    assert steps(run) == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """The folder of the agent that `etude new agent` writes, with its untrained model."""
    folder = tmp_path_factory.mktemp("new")
    write_agent("shop", folder)
    runpy.run_path(str(folder / "shop" / "model.py"))
    return folder / "shop"


def trained(agent, run, capsys, pays, *more):
    """What two steps under a reward that always `pays` print, and Why."""
    (run.parent / "pay.py").write_text(f"def compute_score(**kwargs):\n    return {pays}\n")
    given = [f"custom_reward_function.path={run.parent}/pay.py", "trainer.total_training_steps=2"]
    given += [f"trainer.default_local_dir={run}", f"trainer.rollout_data_dir={run}/rollouts"]
    given += ["trainer.logger=[console,jsonl]", "trainer.test_freq=-1", "trainer.val_before_train=false", *more]
    assert run_command(cli, ["train", "--config-path", str(agent), "--config-name", "agent", *given]) == 0
    shown = capsys.readouterr()
    assert run_command(cli, ["report", str(run), "--why"]) == 0
    return shown.out + shown.err, capsys.readouterr().out


def test_an_untrained_model_is_told_as_such(agent, tmp_path, capsys):
    shown, why = trained(agent, tmp_path / "run", capsys, 0.0)
    [record, _] = metrics(tmp_path / "run")
    chance = record["actor/entropy"] / record["actor/entropy_share"]
    assert chance == pytest.approx(math.log(json.loads((agent / "model" / "config.json").read_text())["vocab_size"]))
    said = "answers are noise, as of an untrained model: entropy "
    assert f"  ! {said}{record['actor/entropy']:.3g} of log(vocabulary) {chance:.3g}" in shown
    first, fix, *others = why.splitlines()
    assert first.startswith(f"step 2: {said}")
    assert fix.startswith("→ warm it up (`etude sft`) or set model.path to a pretrained one")
    assert {each for each in others if "  →" in each} == {"  → mend the above first: these mostly come of it"}


def test_an_estimator_that_takes_no_negative_rewards_says_that_nothing_is_learned(agent, tmp_path, capsys):
    differs = "-1.0 - len(kwargs['solution_str']) % 2"
    shown, why = trained(agent, tmp_path / "run", capsys, differs, "algorithm.adv_estimator=max_rl")
    assert "  ! rewards differ, and no answer has an advantage: nothing is learned" in shown
    assert "rewards differ, and no answer has an advantage" in why
    assert "no answer has an advantage" not in trained(agent, tmp_path / "grpo", capsys, differs)[0]


def test_a_reward_that_pays_anything_is_one_story(agent, tmp_path, capsys):
    shown, why = trained(agent, tmp_path / "run", capsys, 1.0)
    assert "all rewards equal (1): a group-relative" in shown
    remedy = "`etude check` and `etude reward try` tell: mend {}; if the model solves the rows, take harder ones"
    assert f"    → does the reward pay whatever the answer? {remedy.format('it')}" in shown
    assert f"every answer earned 1 from step 1 on; `etude report {tmp_path / 'run'} --why`" in shown
    first, *lines = why.splitlines()
    assert first == "step 2: 100 % of rollouts do not hold the right number, and are paid for it"
    [paid] = [n for n, line in enumerate(lines) if "earned 1, as all since step 1 (does the reward pay" in line]
    assert remedy.format("pay.py: compute_score") in lines[paid + 1]
    assert {each for each in lines[paid + 2 :] if "  →" in each} == {
        "  → mend the above first: these mostly come of it"
    }
    assert "most likely solved" not in why
    assert "untrained" not in shown + why


SOON_SOLVED = """calls = []
def compute_score(solution_str, **kwargs):
    calls.append(solution_str)
    return PAID if len(calls) > 16 or len(calls) % 2 else 0.0
"""


@pytest.mark.parametrize(
    ("follows", "last", "paid", "said"),
    [
        ("stop", 5, "1.0", "solved: in the last 3"),
        ("continue", 6, "1.0", "solved: in the last 3"),
        ("stop", 5, "{'score': 0.1, 'acc': 0.0}", "though no answer is a success (an acc, or a reward, of 1): in the"),
    ],
)
def test_a_solved_task_is_no_error(tiny, tmp_path, capsys, follows, last, paid, said):
    """Two steps of eight rollouts spread; then all earn the highest reward, and none is left to train on."""
    (tmp_path / "solved.py").write_text(SOON_SOLVED.replace("PAID", paid))
    run = tmp_path / "run"
    arguments = tiny.arguments(
        run,
        f"custom_reward_function.path={tmp_path}/solved.py",
        "reward_model.tool_reward_weight=0",
        "algorithm.zero_variance=mask",
        f"trainer.on_solved={follows}",
        f"data.val_files={tiny.folder}/data/val.parquet",
        "trainer.val_before_train=false",
        "trainer.logger=[console,jsonl]",
    )
    assert run_command(cli, ["train", *arguments]) == 0
    shown = capsys.readouterr()
    told = (shown.out + shown.err).replace("\n", " ")
    assert "trainer.on_solved" in told
    assert said in " ".join(told.split())
    assert steps(run) == [*range(1, last + 1)]
    assert (run / f"global_step_{last}").is_dir()
    assert json.loads((run / "run.json").read_text())["ended"] == "completed"
    assert any(name.startswith("val-core/") for name in metrics(run)[-1])
    assert run_command(cli, ["train", *arguments]) == 0  # nothing is left to do
    assert steps(run) == [*range(1, last + 1)]


def empty_steps(*given, ends_run=True):
    """Notes steps of (lowest, mean, highest reward); groups have spread in `SPREAD` alone."""
    guard = EmptySteps(4, ends_run=ends_run)
    for step in given:
        kept = float(step is SPREAD)
        shares = {"rollout/equal_groups_share": 1 - kept / 2, "training/filter_groups/kept": kept}
        guard.note(shares | {f"critic/score/{name}": value for name, value in zip(("min", "mean", "max"), step)})
    return guard


def test_only_steps_in_a_row_without_a_token_end_a_run():
    empty = {"training/filter_groups/kept": 0.0, "rollout/prompt_too_long": 8.0}
    guard = EmptySteps(4, ends_run=True)
    for step in (empty, empty, {"training/filter_groups/kept": 0.5}, empty, empty):
        guard.note(step)
        guard.check()
    guard.note(empty)
    with pytest.raises(TrainingStopped, match=r"last 3 .*: 8 prompts too long; no trajectory was left to train on"):
        guard.check()


SPREAD, BEST, MOSTLY, WORST, HALF = (-1, 0, 1), (1, 1, 1), (0, 0.95, 1), (-1, -1, -1), (0, 0.5, 1)


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        ([SPREAD, BEST, BEST, BEST], True),
        ([SPREAD, BEST, MOSTLY, BEST], True),  # some prompts are not solved, and no group's rewards differ
        ([SPREAD, BEST, BEST], False),
        ([SPREAD, BEST, BEST, SPREAD, BEST], False),
        ([BEST, BEST, BEST, BEST], False),  # a scorer that always says 1
        ([SPREAD, WORST, WORST, WORST], False),
        ([SPREAD, HALF, HALF, HALF], False),  # a collapsed policy
    ],
)
def test_a_task_is_solved_where_equal_rewards_are_the_best_ones(given, solved):
    guard = empty_steps(*given)
    assert (guard.solved, guard.ends_run) == (solved, solved)
    resumed = EmptySteps(4, ends_run=True)
    resumed.restore(json.loads(json.dumps(guard.state())))
    assert resumed.solved == solved
    assert not empty_steps(*given, ends_run=False).ends_run
    if solved or len(given) < 4 or given[3] is SPREAD:
        guard.check()
    else:
        with pytest.raises(TrainingStopped):
            guard.check()


def test_a_run_whose_steps_are_all_skipped_stops_and_can_go_on(tiny, tmp_path, capsys):
    (tmp_path / "broken.py").write_text(
        "from etude.algorithms import POLICY_LOSSES\n"
        "@POLICY_LOSSES.register('broken')\n"
        "def broken(*, log_prob, **_):\n"
        "    return log_prob.sum() * float('nan'), {}\n"
    )
    run = tmp_path / "run"
    arguments = tiny.arguments(
        run, f"plugins=[{tiny.folder}/agent.py,{tmp_path}/broken.py]", "trainer.max_skipped_steps=2"
    )
    assert run_command(cli, ["train", *arguments, f"{ACTOR}.policy_loss.loss_mode=broken"]) == 2
    error = capsys.readouterr().err
    assert (
        "the gradients of the actor were not finite in the last 2 training steps (trainer.max_skipped_steps)" in error
    )
    assert steps(run) == [1, 2]
    assert [record["actor/skipped_steps"] for record in metrics(run)] == [1, 1]
    assert same(weights(run, 2), load_file(tiny.model / "model.safetensors"))
    assert run_command(cli, ["train", *arguments, "trainer.total_training_steps=3"]) == 0
    assert steps(run) == [1, 2, 3]
    assert not same(weights(run, 3), weights(run, 2))


def test_a_run_stops_when_its_judges_cost_too_much_and_goes_on_with_more(tiny, tmp_path, capsys):
    """Failed attempts are paid for, too; what was spent is in the checkpoint."""
    (tmp_path / "paid.py").write_text(
        "from etude.rewards import usage\n"
        "seen = set()\n"
        "def compute_score(solution_str, trajectory):\n"
        "    usage.count(requests=1, prompt_tokens=100, cost=0.25)\n"
        "    if trajectory.messages[0]['content'] not in seen and not seen.add(trajectory.messages[0]['content']):\n"
        "        raise ConnectionError\n"
        "    return len(solution_str)\n"
    )
    run = tmp_path / "run"
    arguments = [*tiny.arguments(run), f"custom_reward_function.path={tmp_path}/paid.py"]
    assert run_command(cli, ["train", *arguments, "reward_model.budget=1.5"]) == 2
    assert "more than reward_model.budget=1.5: raise it" in capsys.readouterr().err
    assert steps(run) == [1]
    [first] = metrics(run)
    assert first["reward/judge/requests"] > 8
    assert first["reward/judge/cost"] == first["reward/judge/requests"] / 4
    assert first["reward/judge/prompt_tokens"] == 100 * first["reward/judge/requests"]
    assert run_command(cli, ["train", *arguments, f"reward_model.budget={first['reward/judge/cost'] - 0.1}"]) == 2
    assert steps(run) == [1]  # nothing more was spent
    assert run_command(cli, ["train", *arguments, "reward_model.budget=100"]) == 0
    assert max(steps(run)) > 1


def test_skipped_steps_count_in_a_row_and_for_each_model():
    guard = SkippedSteps(3)

    def step(actor, critic=(2, 0)):
        names = ("optimizer_steps", "skipped_steps")
        pairs = [("actor", actor), ("critic", critic)]
        guard.note({f"{role}/{name}": n for role, counts in pairs for name, n in zip(names, counts)})

    step((2, 2))
    step((2, 2))
    step((2, 1))  # something was learned
    step((2, 2))
    step((2, 2))
    guard.note({"training/global_step": 7})  # nothing to learn: neither way
    with pytest.raises(TrainingStopped, match="of the critic were not finite in the last 3"):
        step((2, 0), critic=(1, 1))
