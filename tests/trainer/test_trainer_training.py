"""The training loop on a tiny model: the order of a step, its figures, its dumps, and every algorithm it offers."""

import asyncio
import dataclasses
import logging
import pickle

import numpy as np
import pytest
from house_stage import ACTOR, ROLLOUT, metrics, same, steps, weights
from safetensors.torch import load_file

from etude.cli.main import cli
from etude.cli.main import run as run_command
from etude.distributed import InProcessWorkerGroup
from etude.dumps import read_rollouts, trajectory_from_record
from etude.errors import DataError
from etude.protocol import DataProto
from etude.rewards import TrajectoryScorer
from etude.trainer.interrupts import Interrupts
from etude.trainer.ppo import PPOTrainer
from etude.trainer.run import train
from etude.trainer.setup import prepare
from etude.workers import build_scorer

TWO_STEPS = ("trainer.total_training_steps=2",)
BELOW = ("generate_sequences", "compute_scores", "compute_log_prob", "compute_ref_log_prob", "compute_values")
CALLS = (*BELOW, "update_critic", "update_actor", "update_weights")


def ready(tiny, folder, *overrides):
    """A trainer that has loaded its models, without having begun."""
    trainer = PPOTrainer(*prepare(tiny.config(folder, *overrides)))
    trainer.init_workers()
    return trainer


def quiet():
    return Interrupts(lambda text: None)


def spied(monkeypatch, trainer):
    """The names of what the trainer asks of its groups, in order."""
    calls = []

    def spy(group, name):
        method = getattr(group, name)

        def called(*args, **kwargs):
            calls.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(group, name, called, raising=False)

    for group in (trainer.groups.actor, trainer.groups.reward, trainer.groups.critic):
        for name in CALLS:
            if group is not None and hasattr(group, name):
                spy(group, name)
    return calls


@pytest.fixture(scope="module")
def grpo(tiny, tmp_path_factory):
    """A finished GRPO run of six steps."""
    folder = tmp_path_factory.mktemp("grpo")
    given = (
        f"data.val_files={tiny.folder}/data/val.parquet",
        "trainer.test_freq=3",
        "trainer.rollout_token_values=true",
    )
    train(tiny.config(folder, *given))
    return folder


def test_a_run_has_its_figures_step_by_step(grpo):
    records = metrics(grpo)
    assert [record["step"] for record in records] == list(range(7))
    names = set(records[3])
    assert names >= {
        f"critic/{n}/{k}" for n in ("score", "rewards", "advantages", "returns") for k in ("mean", "max", "min")
    }
    assert names >= {f"actor/{n}" for n in ("entropy", "loss", "pg_clipfrac", "ppo_kl", "grad_norm", "lr")}
    assert names >= {
        f"{n}/{k}" for n in ("response_length", "prompt_length", "num_turns") for k in ("mean", "max", "min")
    }
    assert names >= {f"reward/{n}/mean" for n in ("step", "final", "score", "total", "success")}
    assert names >= {f"tool/calculator/{n}" for n in ("calls", "errors", "latency_p50", "latency_p95", "reward")}
    assert names >= {"rollout/infrastructure_failures", "rollout/dropped", "rollout/tool_use_rate"}
    assert names >= {
        "timing_s/gen",
        "timing_s/adv",
        "timing_s/update_actor",
        "timing_s/update_weights",
        "timing_s/step",
        "timing_s/testing",
    }
    assert names >= {"training/global_step", "response_length/clip_ratio", "perf/throughput", "perf/total_num_tokens"}
    validated = [r["step"] for r in records if "val-core/etude/arithmetic/reward/mean@1" in r]
    assert validated == [0, 3, 6]


def test_every_process_reads_the_options_that_were_composed(tiny, tmp_path):
    config = tiny.config(tmp_path)
    trainer = PPOTrainer(*prepare(config))
    assert trainer.options is config is trainer.groups.actor._workers[0].options
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.trainer.seed = 3
    trainer.groups.close()


def test_a_run_changes_the_weights_and_leaves_a_checkpoint_of_the_last_step(tiny, grpo):
    assert not same(weights(grpo, 6), load_file(tiny.model / "model.safetensors"))
    assert (grpo / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert (grpo / "config.yaml").is_file()


def test_a_dump_is_enough_to_score_again(tiny, grpo):
    """From the dump alone, without the model: masks, totals on tokens, and the manager's own score."""
    setup, _ = prepare(tiny.config(grpo))
    scorer = build_scorer(setup.options, setup.tokenizer)
    assert isinstance(scorer, TrajectoryScorer)
    seen = 0
    for step in range(1, 7):
        for record in read_rollouts(grpo / "rollouts" / f"{step}.jsonl"):
            trajectory = trajectory_from_record(record)
            assert record["step"] == step
            assert trajectory.response_mask == record["response_mask"]
            assert trajectory.response_ids == record["response_ids"]
            assert sum(trajectory.token_level_scores()) == pytest.approx(record["score"])
            assert setup.tokenizer.decode(trajectory.response_ids) == record["output"]
            row = {"data_source": record["data_source"], "reward_model": {"ground_truth": record["gts"]}}
            before, trajectory.rewards.score = trajectory.rewards.score, None
            asyncio.run(scorer(trajectory, row | {"extra_info": record["extra_info"]}))
            assert trajectory.rewards.score == before
            seen += 1
    assert seen == 6 * 8


def test_a_dump_says_what_the_trainer_had_of_each_token(grpo):
    """One update a batch: its own log-probs are the old ones, and the engine's up to rounding."""
    groups = {}
    for record in read_rollouts(grpo / "rollouts" / "3.jsonl"):
        groups.setdefault(record["uid"], []).append(record)
    assert len(groups) == 2
    for members in groups.values():
        scores = np.array([record["score"] for record in members])
        expected = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
        for record, advantage in zip(members, expected):
            values, mask = record["token_values"], record["response_mask"]
            assert set(values) == {"advantages", "log_probs", "entropys"}
            for column in values.values():
                assert [value is not None for value in column] == [bool(each) for each in mask]
            for token, log_prob in enumerate(record["response_log_probs"]):
                if mask[token]:
                    assert values["advantages"][token] == pytest.approx(advantage, abs=1e-5)
                    assert values["log_probs"][token] == pytest.approx(log_prob, abs=1e-4)
                    assert values["entropys"][token] > 0
    validated = next(read_rollouts(grpo / "rollouts" / "1.jsonl"))
    assert [name for name, _, _ in validated["timeline"]][:2] == ["queue", "generate_sequences"]
    assert validated["timeline"][-1][0] == "compute_score"
    starts = [start for _, start, _ in validated["timeline"]]
    assert starts == sorted(starts)


def test_a_step_goes_in_the_documented_order_through_groups_alone(tiny, tmp_path, monkeypatch):
    trainer = ready(
        tiny,
        tmp_path,
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        f"{ACTOR}.ppo_mini_batch_size=1",
        f"{ROLLOUT}.mode=sync",
    )
    groups = (trainer.groups.actor, trainer.groups.reward, trainer.groups.critic)
    assert all(isinstance(group, InProcessWorkerGroup) for group in groups)
    calls = spied(monkeypatch, trainer)
    figures = trainer.training_step(quiet())
    twice = ("update_critic", "update_critic", "update_actor", "update_actor")  # one for each mini-batch
    assert calls == [*BELOW, *twice, "update_weights"]
    assert {"critic/vf_loss", "critic/grad_norm", "critic/values/mean", "critic/vf_explained_var"} <= figures.keys()


BYPASS = (f"{ACTOR}.ppo_mini_batch_size=1", "algorithm.rollout_correction.bypass_mode=true")


@pytest.mark.parametrize(("settings", "updates"), [((), 1), (BYPASS, 2)], ids=["one update", "bypass"])
def test_old_log_probs_that_are_not_needed_are_not_computed(tiny, tmp_path, monkeypatch, settings, updates):
    """And GRPO has no critic."""
    trainer = ready(tiny, tmp_path, *settings)
    calls = spied(monkeypatch, trainer)
    trainer.training_step(quiet())
    assert calls == ["generate_sequences", *["update_actor"] * updates, "update_weights"]


def test_lock_step_rollouts_give_the_same_rewards_and_weights(tiny, tmp_path):
    for mode in ("async", "sync"):
        train(tiny.config(tmp_path / mode, *TWO_STEPS, f"{ROLLOUT}.mode={mode}"))
    assert same(weights(tmp_path / "async", 2), weights(tmp_path / "sync", 2))
    first, second = (list(read_rollouts(tmp_path / mode / "rollouts" / "2.jsonl")) for mode in ("async", "sync"))
    assert [r["score"] for r in first] == [r["score"] for r in second]
    assert [r["response_ids"] for r in first] == [r["response_ids"] for r in second]


def test_a_critic_on_the_policys_trunk_learns_where_batches_are_in_another_process(tiny, tmp_path, monkeypatch):
    """What a function on a batch does not return is lost there, as on Ray."""
    keys = ("algorithm.adv_estimator=gae", "critic.share_trunk=true", "trainer.total_training_steps=1")
    train(tiny.config(tmp_path / "here", *keys))

    init = PPOTrainer.init_workers

    def init_workers(self):
        init(self)
        run = self.groups.run

        def run_elsewhere(function, *args, **keywords):
            sent = [each.select(deepcopy=True) if isinstance(each, DataProto) else each for each in args]
            return run(function, *sent, **keywords)

        self.groups = dataclasses.replace(self.groups, run=run_elsewhere)

    monkeypatch.setattr(PPOTrainer, "init_workers", init_workers)
    train(tiny.config(tmp_path / "there", *keys))
    assert same(weights(tmp_path / "here", 1), weights(tmp_path / "there", 1))


def test_filtered_groups_are_refilled_and_never_more_than_a_batch(tiny, tmp_path, monkeypatch):
    trainer = ready(
        tiny, tmp_path, "algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2"
    )
    calls = spied(monkeypatch, trainer)
    learned = []
    update = trainer._update_actor
    monkeypatch.setattr(trainer, "_update_actor", lambda data: learned.append(data) or update(data))
    rounds = []
    for _ in range(5):
        before = len(calls)
        trainer.training_step(quiet())
        rounds.append(calls[before:].count("generate_sequences"))
    assert set(rounds) == {1, 2}
    for batch in learned:
        groups = {}
        totals = batch.batch["token_level_scores"].sum(dim=1).tolist()
        for uid, total in zip(batch.non_tensor_batch["uid"].tolist(), totals):
            groups.setdefault(uid, []).append(total)
        assert len(groups) <= 2  # data.train_batch_size
        assert all(max(group) > min(group) for group in groups.values())


def test_a_batch_without_any_spread_is_a_step_without_an_update(tiny, tmp_path):
    (tmp_path / "flat.py").write_text("def compute_score(**kwargs):\n    return 1.0\n")
    flat = f"custom_reward_function.path={tmp_path}/flat.py"
    train(tiny.config(tmp_path, *TWO_STEPS, flat, "algorithm.filter_groups.enable=true"))
    assert steps(tmp_path) == [1, 2]
    assert same(weights(tmp_path, 2), load_file(tiny.model / "model.safetensors"))
    assert metrics(tmp_path)[0]["training/filter_groups/kept"] == 0


FILTERED = ("trainer.total_training_steps=1", "algorithm.filter_groups.enable=true")


def filtered(folder):
    (record,) = metrics(folder)
    return {name.rpartition("/")[2]: value for name, value in record.items() if "filter_groups" in name}


def test_refills_end_at_their_bound_and_what_they_lacked_is_counted(tiny, tmp_path):
    (tmp_path / "flat.py").write_text("def compute_score(**kwargs):\n    return 1.0\n")
    flat = f"custom_reward_function.path={tmp_path}/flat.py"
    train(tiny.config(tmp_path / "run", *FILTERED, flat, "algorithm.filter_groups.max_num_gen_batches=3"))
    left_out = {"evicted_samples": 6, "discarded_surplus_samples": 0, "missing_samples": 2}
    assert filtered(tmp_path / "run") == {"num_gen_batches": 3, "kept": 0, **left_out}


SCORER = """
def compute_score(solution_str, **kwargs):
    return {"score": float(len(solution_str)), "acc": 1.0}
"""


@pytest.mark.parametrize("metric", ["reward", "acc"])
def test_groups_are_told_apart_by_the_chosen_number(tiny, tmp_path, metric):
    """Scores that all differ, and one number that never does."""
    (tmp_path / "long.py").write_text(SCORER)
    scorer = f"custom_reward_function.path={tmp_path}/long.py"
    train(tiny.config(tmp_path / "run", *FILTERED, scorer, f"algorithm.filter_groups.metric={metric}"))
    assert filtered(tmp_path / "run")["evicted_samples"] == (2 if metric == "acc" else 0)


def test_a_number_that_the_scorer_does_not_report_is_an_error_that_names_those_it_does(tiny, tmp_path):
    (tmp_path / "long.py").write_text(SCORER)
    scorer = f"custom_reward_function.path={tmp_path}/long.py"
    with pytest.raises(
        DataError, match=r"metric=acuracy: the scorer reports no such number .*known: reward, score, acc"
    ):
        train(tiny.config(tmp_path / "run", *FILTERED, scorer, "algorithm.filter_groups.metric=acuracy"))


@pytest.mark.parametrize("limit", ["data.max_response_length=12", f"{ROLLOUT}.max_model_len=64"])
def test_a_response_is_clipped_by_whichever_limit_it_meets(tiny, tmp_path, limit):
    train(tiny.config(tmp_path, "trainer.total_training_steps=1", "data.max_prompt_length=60", limit))
    lengths = [
        (len(record["prompt_ids"]), len(record["response_ids"]))
        for record in read_rollouts(tmp_path / "rollouts" / "1.jsonl")
    ]
    clipped = [response == 12 if "response" in limit else prompt + response == 64 for prompt, response in lengths]
    assert any(clipped), lengths
    assert metrics(tmp_path)[0]["response_length/clip_ratio"] == sum(clipped) / len(clipped)


def test_epochs_follow_each_other(tiny, tmp_path):
    files = f"data.train_files={tiny.folder}/data/val.parquet"  # three rows: one batch of two an epoch
    train(tiny.config(tmp_path, files, "trainer.total_training_steps=null", "trainer.total_epochs=3"))
    assert steps(tmp_path) == [1, 2, 3]


def test_epochs_are_passes_over_the_data_however_many_batches_a_step_takes(tiny, tmp_path):
    (tmp_path / "flat.py").write_text("def compute_score(**kwargs):\n    return 1.0\n")
    config = tiny.config(
        tmp_path / "run",
        f"custom_reward_function.path={tmp_path}/flat.py",  # no group has spread: every step takes all it may
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=3",
        "trainer.total_training_steps=null",
        "trainer.total_epochs=1",
    )
    train(config)
    dumped = [list(read_rollouts(tmp_path / "run" / "rollouts" / f"{step}.jsonl")) for step in steps(tmp_path / "run")]
    assert [len(records) for records in dumped] == [3 * 8, 8]  # three of the four batches, and the last one
    assert len({record["index"] for records in dumped for record in records}) == 8
    assert (tmp_path / "run" / "global_step_2").is_dir()
    train(config)
    assert steps(tmp_path / "run") == [1, 2]


def test_validation_dumps_and_repeated_answers(tiny, tmp_path):
    train(
        tiny.config(
            tmp_path,
            "trainer.total_training_steps=1",
            f"data.val_files={tiny.folder}/data/val.parquet",
            "data.val_batch_size=2",  # two parts of different widths
            "data.val_max_samples=3",
            f"{ROLLOUT}.val_kwargs.n=2",
            f"{ROLLOUT}.val_kwargs.do_sample=true",
        )
    )
    records = list(read_rollouts(tmp_path / "validation" / "1.jsonl"))
    assert len(records) == 6
    assert len({record["uid"] for record in records}) == 3
    assert "val-core/etude/arithmetic/reward/mean@2" in metrics(tmp_path)[-1]


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ((), False),
        (("reward_model.enable=false",), True),
        (("reward_model.score_weight=0",), True),
        (("reward_model.enable=false", "plugins=[{folder}/agent.py]"), False),
        (("reward_model.enable=false", f"{ROLLOUT}.multi_turn.tool_config_path={{folder}}/judge.yaml"), False),
    ],
)
def test_tools_that_may_reward_nothing_draw_one_warning(tiny, tmp_path, caplog, settings, warned):
    (tmp_path / "judge.py").write_text(
        "from etude.tools import BaseTool\n\n\nclass Judge(BaseTool):\n"
        "    async def execute(self, instance_id, parameters, **kwargs):\n        return '', 0.0, {}\n\n"
        "    async def calc_reward(self, instance_id, **kwargs):\n        return 1.0\n"
    )
    schema = (
        "{type: function, function: {name: calculator, description: d, parameters: {type: object, properties: {}}}}"
    )
    (tmp_path / "judge.yaml").write_text(f"tools:\n- {{class_name: 'judge.py:Judge', tool_schema: {schema}}}\n")
    (tmp_path / "agent.py").write_text("")
    given = ["plugins=[]", f"{ROLLOUT}.multi_turn.format=hermes", "custom_reward_function.path=null", *settings]
    with caplog.at_level(logging.WARNING, logger="etude"):
        PPOTrainer(*prepare(tiny.config(tmp_path, *(each.format(folder=tmp_path) for each in given))))
    lines = [r.getMessage() for r in caplog.records if "every answer earns 0" in r.getMessage()]
    assert len(lines) == warned
    assert all("no tool (calculator) has a calc_reward" in line for line in lines)


def test_two_judges_of_one_answer_draw_one_warning(tiny, tmp_path, caplog):
    """Of rows of any data source: only the first row was looked at."""
    from etude.data.files import read_rows

    rows = read_rows(tiny.folder / "data" / "train.parquet")
    rows[0]["data_source"] = "another"
    rows[0]["extra_info"] |= {"need_tools_kwargs": False, "tools_kwargs": None}
    for row in rows[1:]:
        truth = row["reward_model"]["ground_truth"]
        row["extra_info"]["tools_kwargs"] = {"calculator": {"create_kwargs": {"ground_truth": truth}}}
    _counts_twice(tiny, tmp_path, caplog, rows)


def test_a_user_who_judges_beside_the_manager_draws_a_warning(tiny, tmp_path, caplog):
    """verl's rows for its GSM8K interaction: a right answer earned 2."""
    from etude.data.files import read_rows

    user = "{name: gsm8k, class_name: etude.agents.interactions.gsm8k.Gsm8kInteraction}"
    (tmp_path / "users.yaml").write_text(f"interaction: [{user}]\n")
    rows = read_rows(tiny.folder / "data" / "train.parquet")
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        row["extra_info"]["interaction_kwargs"] = {"name": "gsm8k", "ground_truth": truth}
    _counts_twice(tiny, tmp_path, caplog, rows, f"{ROLLOUT}.multi_turn.interaction_config_path={tmp_path}/users.yaml")


def _counts_twice(tiny, tmp_path, caplog, rows, *settings):
    from etude.data.files import write_parquet

    path = write_parquet(rows, tmp_path / "twice.parquet")
    with caplog.at_level(logging.WARNING, logger="etude"):
        PPOTrainer(*prepare(tiny.config(tmp_path, f"data.train_files={path}", *settings)))
    assert sum("counts twice" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.slow
def test_the_command_trains_and_reports(tiny, tmp_path, capsys):
    arguments = tiny.arguments(
        tmp_path, *TWO_STEPS, "trainer.logger=[console,jsonl,tensorboard]", "trainer.report=true"
    )
    assert run_command(cli, ["train", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "step 2/2" in shown
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert '"status": "ended"' in page
    assert list((tmp_path / "tensorboard").iterdir())
