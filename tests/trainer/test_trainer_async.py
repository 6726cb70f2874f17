"""Rollouts that go on while the policy learns: every prompt accounted for, none trained on that is too old, whatever happens
to the run."""

import os
import signal
import threading
import time
from contextlib import suppress

import pytest
from async_stage import ASYNC, accounts, dropped, kill_and_resume, plan, slow_tool, trained
from house_stage import ROLLOUT, Launched, metrics, one_line_error, same, steps, weights
from trainer_tools import Moody

from etude.dumps import read_rollouts
from etude.errors import EtudeError, TrainingStopped
from etude.trainer.checkpoints import Checkpoints
from etude.trainer.interrupts import Interrupted
from etude.trainer.ppo import PPOTrainer
from etude.trainer.rollouts import rollouts_of
from etude.trainer.run import train
from etude.trainer.setup import prepare


def versions(run, step):
    """Of each rollout in a step's dump, the versions of its sampled tokens."""
    records = read_rollouts(run / "rollouts" / f"{step}.jsonl")
    return [[v for s in record["segments"] for v in s.get("weight_versions") or ()] for record in records]


@pytest.mark.parametrize("level", [0, 1, 4])
def test_every_prompt_of_the_plan_is_trained_on_once_and_none_is_too_old(tiny, tmp_path, level):
    run = tmp_path / "run"
    train(tiny.config(run, *ASYNC, f"trainer.max_staleness={level}", slow_tool(tmp_path / "tool", 0.02)))
    assert sorted(trained(run)) == plan(6)
    assert dropped(run) == {}
    assert [len(line["trained"]) for line in accounts(run)] == [2] * 6
    ages = [step - 1 - v for step in range(1, 7) for rollout in versions(run, step) for v in rollout]
    assert min(ages) >= 0
    assert max(ages) == (0 if level == 0 else max(ages))
    assert max(ages) <= level
    for record in metrics(run):
        assert record["prompts/planned"] == record["prompts/trained"] == 2.0
        assert ("staleness/mean" in record) == (level > 0)
        if level:
            shares = {int(n.split("/")[2]): v for n, v in record.items() if n.startswith("staleness/share/")}
            assert sum(shares.values()) == pytest.approx(1.0)
            assert record["staleness/mean"] == pytest.approx(sum(age * share for age, share in shares.items()))
            assert record["staleness/max"] == max(shares) <= level
            assert "rollout_corr/rollout_is_mean" in record  # corrected by default
    assert (max(record.get("staleness/max", 0) for record in metrics(run)) > 0) == (level > 0)


def test_the_engines_figures_lose_no_token_around_a_sync(tiny, tmp_path):
    run, own = tmp_path / "run", ("trainer.max_staleness=2", "trainer.val_before_train=false", "trainer.test_freq=-1")
    train(tiny.config(run, *ASYNC, *own, slow_tool(tmp_path / "tool", 0.02)))
    sampled = [sum(map(len, versions(run, step))) for step in range(1, 7)]
    # A step may find all its tokens sampled.
    assert sum(record.get("engine/sampled_tokens", 0) for record in metrics(run)) == sum(sampled)


def test_an_update_reaches_a_trajectory_in_flight_or_waits_for_its_end(tiny, tmp_path):
    """The tool answers when it is let: under version 1 the first half of a trajectory is of version 0."""
    for partial in (True, False):
        gate = tmp_path / f"gate-{partial}"
        wait = f"while not pathlib.Path({str(gate)!r}).exists(): await asyncio.sleep(0.01)"
        tool = Moody(tmp_path / f"tool-{partial}", wait, good=0)
        prepared = prepare(
            tiny.config(
                tmp_path / f"run-{partial}",
                *ASYNC,
                "trainer.max_staleness=1",
                f"{ROLLOUT}.partial_rollout={str(partial).lower()}",
                tool.override,
            )
        )
        trainer = PPOTrainer(*prepared)
        try:
            trainer.init_workers()
            trainer.feed.end_step(0, 6)
            while not tool.count("mood"):
                time.sleep(0.02)
            handed = threading.Thread(target=trainer.groups.rollout.update_weights, args=(1,))
            handed.start()
            if partial:
                handed.join(60)
                assert not handed.is_alive()
            else:
                handed.join(0.3)
                assert handed.is_alive()  # for as long as a tool runs
            gate.touch()
            handed.join(60)
            assert not handed.is_alive()
            rolled = []
            while len(rolled) < 16:
                [(groups, _)] = trainer.groups.rollout.collect(1.0)
                rolled += [rollout for _, batch in groups for rollout in rollouts_of(batch)]
        finally:
            trainer.groups.close()
        held = [r.trajectory for r in rolled if len(r.trajectory.tool_calls)]
        drawn = [[v for s in each.segments for v in s.weight_versions or ()] for each in held]
        assert all(each == sorted(each) for each in drawn)
        assert {0, 1} in map(set, drawn) if partial else {v for each in drawn for v in each} == {0}
        assert tool.count("release") == tool.count("create")


def test_validation_is_of_the_weights_of_its_step(tiny, tmp_path):
    run, val = tmp_path / "run", f"data.val_files={tiny.folder}/data/val.parquet"
    settings = (val, "trainer.test_freq=2", f"trainer.validation_data_dir={run}/val", "trainer.max_staleness=2")
    train(tiny.config(run, *ASYNC, *settings, slow_tool(tmp_path / "tool", 0.05)))
    for step in (2, 4, 6):
        records = read_rollouts(run / "val" / f"{step}.jsonl")
        drawn = {v for record in records for s in record["segments"] for v in s.get("weight_versions") or ()}
        assert drawn == {step}


HALF = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(extra_info["index"] % 2 and len(solution_str) % 3)
"""


def test_groups_of_equal_scores_are_replaced_and_accounted_for(tiny, tmp_path):
    """Every second prompt is scored 0 whatever is answered."""
    (tmp_path / "half.py").write_text(HALF)
    run = tmp_path / "run"
    settings = ("algorithm.zero_variance=refill", "algorithm.filter_groups.max_num_gen_batches=4")
    scorer = f"custom_reward_function.path={tmp_path / 'half.py'}"
    train(tiny.config(run, *ASYNC, "trainer.max_staleness=2", *settings, scorer, "trainer.total_training_steps=4"))
    everything = trained(run) + [uid for uids in dropped(run).values() for uid in uids]
    assert len(everything) == len(set(everything))
    assert set(dropped(run)) == {"not_learned"}
    left = [f"{batch}.0-{place}" for batch, place in Checkpoints.read_state(run / "global_step_4").get("untrained", [])]
    begun = max(int(uid.partition(".")[0]) for uid in everything + left)
    assert sorted(everything + left) == plan(begun)
    for record, line in zip(metrics(run), accounts(run)):
        assert len(line["trained"]) <= 2
        assert record["prompts/planned"] == len(line["trained"]) + sum(map(len, line["dropped"].values()))


@pytest.mark.parametrize(("step", "too_old"), [(2, False), (3, True)])
def test_groups_are_trained_on_at_their_deadline_and_not_a_step_later(tiny, tmp_path, step, too_old):
    """They start under version 0, so with a staleness of 1 the second step is the last that may train on them. (A step that
    finds too few groups with spread leaves more groups for the next ones than these may train on.)"""
    trainer = PPOTrainer(*prepare(tiny.config(tmp_path, *ASYNC, "trainer.max_staleness=1")))
    try:
        trainer.init_workers()
        trainer.feed.end_step(0, 6)
        taken = trainer.feed.take(step, 6)
    finally:
        trainer.groups.close()
    uids = {uid for uid, *_ in taken.rolled}
    assert len(uids) == 2
    assert taken.stale == (uids if too_old else set())
    assert len(rollouts_of(taken.batch)) == (0 if too_old else 2 * trainer.options.rollout.n)


def test_an_estimator_with_greedy_baselines_streams_too(tiny, tmp_path):
    run = tmp_path / "run"
    train(tiny.config(run, *ASYNC, "trainer.max_staleness=1", "algorithm.adv_estimator=remax"))
    assert sorted(trained(run)) == plan(6)
    assert all("baseline/reward/total/mean" in record for record in metrics(run))


def test_rollouts_do_not_age_while_only_the_critic_learns(tiny, tmp_path):
    warm_up = ("algorithm.adv_estimator=gae", "trainer.critic_warmup=2", "trainer.total_training_steps=4")
    train(tiny.config(tmp_path, *ASYNC, "trainer.max_staleness=1", *warm_up))
    ages = [record["staleness/max"] for record in metrics(tmp_path)]
    assert ages[:3] == [0.0, 0.0, 0.0]  # the third step is the first to move the policy
    assert ["actor/optimizer_steps" in record for record in metrics(tmp_path)] == [False, False, True, True]


def test_a_step_whose_dump_cannot_be_written_is_in_the_accounts(tiny, tmp_path, monkeypatch):
    def full(self, folder, rollouts, values=()):
        if self.global_step == 2:
            raise EtudeError("disk is full")
        return {}

    monkeypatch.setattr(PPOTrainer, "_dump", full)
    with pytest.raises(EtudeError, match="disk is full"):
        train(tiny.config(tmp_path, *ASYNC))
    assert [line["step"] for line in accounts(tmp_path)] == [1, 2]
    assert (tmp_path / "global_step_2").is_dir()
    monkeypatch.undo()
    train(tiny.config(tmp_path, *ASYNC))
    assert sorted(trained(tmp_path)) == plan(6)


def test_prompts_whose_infrastructure_broke_are_accounted_for(tiny, tmp_path):
    """Every call of the tool fails in some trajectories: their groups are dropped, with the cause."""
    tool = Moody(tmp_path / "tool", "raise ConnectionError('gone')", good=3)
    run = tmp_path / "run"
    settings = ("trainer.min_valid_fraction=0", "trainer.max_staleness=1", "trainer.total_training_steps=3")
    settings += (f"{ROLLOUT}.infrastructure_retries=0", f"{ROLLOUT}.n=2")
    with suppress(TrainingStopped):  # for want of anything to train on
        train(tiny.config(run, *ASYNC, *settings, tool.override))
    lost = dropped(run)
    assert set(lost) <= {"infrastructure", "cancelled"}
    assert lost
    assert sorted(trained(run) + [uid for uids in lost.values() for uid in uids]) == plan(3)


FUSSY = """
from etude.errors import EtudeError

calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    if calls > 20:
        raise EtudeError("a bug of mine")
    return len(solution_str) % 3
"""


def test_an_error_of_a_rollout_ends_the_run_with_the_last_step_saved(tiny, tmp_path):
    (tmp_path / "fussy.py").write_text(FUSSY)
    run, tool = tmp_path / "run", Moody(tmp_path / "tool", "pass")
    scorer = f"custom_reward_function.path={tmp_path / 'fussy.py'}"
    with pytest.raises(EtudeError, match="a bug of mine"):
        train(tiny.config(run, *ASYNC, "trainer.max_staleness=1", scorer, tool.override))
    assert steps(run)[-1] in (1, 2)
    assert (run / "latest_checkpointed_iteration.txt").read_text() == str(steps(run)[-1])
    assert tool.count("release") == tool.count("create")


# -- signals, kills, resumes -------------------------------------------------------------------------------------------


def test_the_first_signal_ends_the_run_after_the_step_and_it_resumes(tiny, tmp_path, monkeypatch):
    step, run = PPOTrainer.training_step, tmp_path / "run"

    def stepped(self, interrupts):
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, interrupts)

    monkeypatch.setattr(PPOTrainer, "training_step", stepped)
    settings = (*ASYNC, "trainer.max_staleness=3", slow_tool(tmp_path / "tool", 0.05))
    with pytest.raises(Interrupted, match="stopped after step 3 of 6"):
        train(tiny.config(run, *settings))
    assert len(Checkpoints.read_state(run / "global_step_3")["untrained"]) == 4
    monkeypatch.undo()
    train(tiny.config(run, *settings))
    assert sorted(trained(run)) == plan(6)


def test_the_second_signal_abandons_the_wait_and_releases_every_tool(tiny, tmp_path):
    run, tool = tmp_path / "run", Moody(tmp_path / "tool", "await asyncio.sleep(3600)", good=8, timeout=7200)
    arguments = tiny.arguments(run, *ASYNC, "trainer.max_staleness=1", tool.override)
    launched = Launched(["train", *arguments], tmp_path / "log")
    while not tool.count("mood"):
        assert launched.process.is_alive(), launched.text()
        launched.process.join(0.05)
    while launched.process.is_alive():  # the first is noted, and one during the wait ends it
        launched.signal(signal.SIGINT)
        launched.process.join(1)
    assert launched.wait() == 128 + signal.SIGINT
    assert "Traceback" not in launched.text()
    assert tool.count("release") == tool.count("create") > 8


@pytest.mark.slow
@pytest.mark.parametrize(("level", "kills"), [(1, (0.5,)), (4, (0.7, 0.9))])
def test_a_run_killed_and_resumed_trains_on_every_prompt_of_the_plan_once(tiny, tmp_path, level, kills):
    """Slow prompts are in flight when it dies, whatever had finished; none of them is lost, nor any other."""
    settings = (*ASYNC, f"trainer.max_staleness={level}", slow_tool(tmp_path / "tool", 0.05))
    run = kill_and_resume(tiny, tmp_path, kills, *settings)
    assert sorted(trained(run)) == plan(6)
    assert [line["step"] for line in accounts(run)] == steps(run) == [1, 2, 3, 4, 5, 6]
    indices = [index for line in accounts(run) for _, index in line["trained"]]
    whole = tmp_path / "whole"
    train(tiny.config(whole, *ASYNC))  # the synchronous run trains on the same rows
    assert sorted(indices) == sorted(index for line in accounts(whole) for _, index in line["trained"])


def test_prompts_in_flight_are_kept_when_a_run_goes_on_synchronously(tiny, tmp_path):
    run = tmp_path / "run"
    settings = (*ASYNC, slow_tool(tmp_path / "tool", 0.01), "trainer.save_freq=1")
    with pytest.MonkeyPatch.context() as patch:
        advance = PPOTrainer._advance

        def dies(self, *given):
            if self.global_step == 2:
                raise EtudeError("dies here")
            return advance(self, *given)

        patch.setattr(PPOTrainer, "_advance", dies)
        with pytest.raises(EtudeError, match="dies here"):
            train(tiny.config(run, *settings, "trainer.max_staleness=4"))
    left = Checkpoints.read_state(run / "global_step_2")["untrained"]
    assert len(left) == 4
    train(tiny.config(run, *settings, "trainer.max_staleness=0"))
    rows = sorted(index for line in accounts(run) for _, index in line["trained"])
    whole = tmp_path / "whole"
    train(tiny.config(whole, *ASYNC))
    assert rows == sorted(index for line in accounts(whole) for _, index in line["trained"])


# -- the synchronous run, and what does not go together ----------------------------------------------------------------


def test_without_staleness_a_run_is_the_synchronous_one_to_the_bit(tiny, tmp_path):
    train(tiny.config(tmp_path / "plain"))
    train(tiny.config(tmp_path / "zero", "trainer.max_staleness=0"))
    assert same(weights(tmp_path / "plain", 6), weights(tmp_path / "zero", 6))
    assert accounts(tmp_path / "plain") == accounts(tmp_path / "zero")
    assert sorted(trained(tmp_path / "plain")) == plan(6)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (("trainer.deterministic=true",), "trainer.max_staleness=1"),
        (("trainer.deterministic=false", f"{ROLLOUT}.mode=sync"), f"{ROLLOUT}.mode=sync"),
    ],
)
def test_what_does_not_go_with_staleness_is_one_line(tiny, tmp_path, capsys, given, line):
    said = one_line_error(capsys, ["train", *tiny.arguments(tmp_path, "trainer.max_staleness=1", *given)])
    assert said.startswith(line)


def test_the_correction_is_on_by_default_and_can_be_chosen(tiny, tmp_path):
    key = "algorithm.rollout_correction"
    stale = ("trainer.max_staleness=1", "trainer.deterministic=false")
    chosen = {
        (): None,
        stale: "token",
        (*stale, f"{key}.bypass_mode=true"): None,
        (*stale, f"{key}.rollout_is=null"): None,
        (*stale, f"{key}.rollout_is=sequence"): "sequence",
    }
    for given, expected in chosen.items():
        assert tiny.config(tmp_path, *given).algorithm.rollout_correction.rollout_is == expected


def test_a_stalled_tool_is_tried_again_and_the_run_goes_on(tiny, tmp_path, caplog):
    """The ninth trajectory's call never answers, once."""
    once = "if LOG.read_text().split().count('mood') == 1: await asyncio.sleep(3600)"
    tool = Moody(tmp_path / "tool", once, good=8, timeout=7200)
    run = tmp_path / "run"
    settings = ("trainer.stall_timeout=1.5", "trainer.total_training_steps=3", "trainer.max_staleness=1")
    train(tiny.config(run, *ASYNC, *settings, tool.override))
    assert sum(record["rollout/stalled"] for record in metrics(run)) == 1
    assert sum(record["rollout/dropped"] for record in metrics(run)) == 0
    [report] = [r.getMessage() for r in caplog.records if "nothing has progressed" in r.getMessage()]
    assert "for tool calculator" in report
    assert sorted(trained(run)) == plan(3)


def test_what_judges_cost_counts_when_it_is_spent_whichever_step_trains_on_it(tiny, tmp_path):
    """Twelve scores are paid for before the first of them arrives, and a step trains on eight."""
    (tmp_path / "paid.py").write_text(
        "import time\n"
        "from etude.rewards import usage\n"
        "paid = []\n"
        "def compute_score(solution_str):\n"
        "    usage.count(requests=1, cost=0.25)\n"
        "    paid.append(1)\n"
        "    while len(paid) < 12:\n"
        "        time.sleep(0.01)\n"
        "    return len(solution_str)\n"
    )
    given = *ASYNC, "trainer.max_staleness=3", f"custom_reward_function.path={tmp_path}/paid.py"
    with pytest.raises(TrainingStopped, match=r"more than reward_model\.budget=2\.5: raise it"):
        train(tiny.config(tmp_path / "run", *given, "reward_model.budget=2.5"))
    [first] = metrics(tmp_path / "run")
    assert first["reward/judge/requests"] >= 12
    assert first["reward/judge/cost"] == first["reward/judge/requests"] / 4
