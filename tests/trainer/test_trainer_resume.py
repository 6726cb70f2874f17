"""Determinism: the same run twice, a run killed and resumed, and what may not change between the two."""

import json
import os
import shutil
import signal
import sys
import threading

import pytest
import yaml
from house_stage import ACTOR, ROLLOUT, Launched, metrics, one_line_error, same, steps, weights
from kills_stage import SAVES, Whole
from trainer_tools import Moody

from etude.data.files import read_rows, write_parquet
from etude.dumps import list_dump_steps, read_rollouts
from etude.errors import CheckpointError, ConfigError, MemoryExhausted
from etude.options.validate import plain
from etude.run_folder import read_run_record
from etude.trainer.events import Notice, StepFinished
from etude.trainer.interrupts import Interrupted
from etude.trainer.ppo import PPOTrainer
from etude.trainer.reproduce import describe_changes
from etude.trainer.resume import Effect, compare
from etude.trainer.run import train
from etude.viewer.display import Display
from etude.workers.checkpoint import read_state

SUICIDE = '''
"""Ends the process without warning: {when}."""

import os
import signal
import sys

from etude.trainer import checkpoints, ppo

advance, replace = ppo.PPOTrainer._advance, os.replace


def advance_or_die(self, *args):
    if {in_step} and self.global_step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return advance(self, *args)


def replace_or_die(source, target):
    if {in_write} and str(target).endswith("global_step_4"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)


ppo.PPOTrainer._advance = advance_or_die
checkpoints.os.replace = replace_or_die
'''


def kill_at(folder, when):
    """The override that loads a plugin which kills the run `when`: "step" 4 begins, or its checkpoint is "write"n."""
    path = folder / f"{when}.py"
    path.write_text(SUICIDE.format(when=when, in_step=when == "step", in_write=when == "write"))
    return path


def with_plugin(tiny, path):
    return f"plugins=[{tiny.folder}/agent.py,{path}]"


@pytest.fixture(scope="module")
def uninterrupted(tiny, tmp_path_factory):
    return Whole.run(tiny, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def whole(uninterrupted):
    """An uninterrupted run of six steps."""
    return uninterrupted.folder


def test_two_runs_end_bit_identical(tiny, whole, tmp_path):
    train(tiny.config(tmp_path))
    assert same(weights(tmp_path, 6), weights(whole, 6))
    for step in range(1, 7):
        ours, theirs = (list(read_rollouts(run / "rollouts" / f"{step}.jsonl")) for run in (tmp_path, whole))
        assert [r["response_ids"] for r in ours] == [r["response_ids"] for r in theirs]
        assert [r["response_log_probs"] for r in ours] == [r["response_log_probs"] for r in theirs]


def test_another_seed_is_another_run(tiny, whole, tmp_path):
    train(tiny.config(tmp_path, "trainer.seed=2"))
    assert not same(weights(tmp_path, 6), weights(whole, 6))


@pytest.mark.parametrize("when", ["step", "write"])
def test_a_killed_and_resumed_run_ends_as_one_that_was_not(tiny, whole, tmp_path, when):
    plugin = kill_at(tmp_path, when)
    run = tmp_path / "run"
    launched = Launched(["train", *tiny.arguments(run, *SAVES, with_plugin(tiny, plugin))], tmp_path / "log")
    assert launched.wait() == -signal.SIGKILL
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert (run / ".incomplete-global_step_4").exists() == (when == "write")
    train(tiny.config(run, *SAVES))
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert same(weights(run, 6), weights(whole, 6))
    assert not list(run.glob(".incomplete*"))
    assert [r["critic/score/mean"] for r in metrics(run)] == [r["critic/score/mean"] for r in metrics(whole)]


def test_a_run_that_started_over_and_was_killed_does_not_go_on_from_the_earlier_runs_checkpoint(tiny, whole, tmp_path):
    run, late = tmp_path / "run", "trainer.save_freq=6"
    train(tiny.config(run, late, "trainer.total_training_steps=4", "trainer.seed=2"))
    settings = (late, "trainer.resume_mode=disable", with_plugin(tiny, kill_at(tmp_path, "step")))
    assert Launched(["train", *tiny.arguments(run, *settings)], tmp_path / "log").wait() == -signal.SIGKILL
    train(tiny.config(run, late))
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert same(weights(run, 6), weights(whole, 6))
    assert not (run / "global_step_4").exists()
    events = []
    train(tiny.config(run / "checkpoints.1", late, "trainer.total_training_steps=4", "trainer.seed=2"), events.append)
    assert StepFinished not in map(type, events)  # it is complete there


@pytest.mark.parametrize(("number", "background"), [(101, "true"), (102, "true"), (103, "false")])
def test_a_run_killed_anywhere_and_resumed_ends_as_one_that_was_not(tiny, uninterrupted, tmp_path, number, background):
    uninterrupted.kill_and_resume(tiny, tmp_path, number, f"trainer.async_save={background}")


def test_a_save_in_the_background_is_of_its_step_and_training_goes_on_meanwhile(tiny, whole, tmp_path, monkeypatch):
    """Each save begins to write only when the next step is done: the weights have moved on by then."""
    wrote, trained = [], [threading.Event() for _ in range(7)]
    write, step = PPOTrainer._write_roles, PPOTrainer.training_step

    def write_late(self, folder):
        wrote.append(number := len(wrote) + 1)
        assert number == 6 or trained[number + 1].wait(60)
        write(self, folder)

    def stepped(self, interrupts):
        made = step(self, interrupts)
        trained[self.global_step].set()
        return made

    monkeypatch.setattr(PPOTrainer, "_write_roles", write_late)
    monkeypatch.setattr(PPOTrainer, "training_step", stepped)
    train(tiny.config(tmp_path, *SAVES, "trainer.async_save=true"))
    assert wrote == [1, 2, 3, 4, 5, 6]
    for number in wrote:
        assert same(weights(tmp_path, number), weights(whole, number))
        ours, theirs = (read_state(run / f"global_step_{number}" / "actor" / "state") for run in (tmp_path, whole))
        assert same(ours, theirs)


def full_disk(self, folder):
    raise OSError("no space left on this disk")


def test_a_failed_save_in_the_background_ends_the_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(PPOTrainer, "_write_roles", full_disk)
    settings = ("trainer.save_freq=1", "trainer.async_save=true")
    with pytest.raises(CheckpointError, match=r"cannot write .*global_step_[12]: .*disk"):
        train(tiny.config(tmp_path, *settings))
    assert len(steps(tmp_path)) in (1, 2)
    assert not list(tmp_path.glob("*global_step*"))


def test_a_resumed_run_drops_the_metrics_of_steps_it_does_again(tiny, whole, tmp_path):
    train(tiny.config(tmp_path, "trainer.save_freq=2"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")  # as if killed after step 5
    events = []
    train(tiny.config(tmp_path, "trainer.save_freq=2"), events.append)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert same(weights(tmp_path, 6), weights(whole, 6))
    folder = tmp_path / "global_step_4"
    assert events[0] == Notice(f"going on after step 4 of 6 ({folder}); steps 5–6 are done again")


def test_where_a_run_goes_on_is_told_before_the_model_is_loaded(tiny, tmp_path, monkeypatch, capsys):
    def load(self):
        raise MemoryError("no model")

    train(tiny.config(tmp_path, "trainer.total_training_steps=2", "trainer.save_freq=1"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    monkeypatch.setattr(PPOTrainer, "init_workers", load)
    with pytest.raises(MemoryExhausted):
        train(tiny.config(tmp_path), Display())
    line = f"going on after step 1 of 6 ({tmp_path}/global_step_1); step 2 is done again"
    assert capsys.readouterr().out == f"{line}\n"


def test_a_finished_run_does_nothing_more_and_a_longer_one_goes_on(tiny, tmp_path):
    train(tiny.config(tmp_path, "trainer.total_training_steps=2"))
    before = [(tmp_path / name).read_bytes() for name in ("metrics.jsonl", "config.yaml", "run.json")]
    for changed in ((), ("reward_model.score_weight=2",)):  # what made no step is not recorded as if it had
        train(tiny.config(tmp_path, "trainer.total_training_steps=2", *changed))
        assert [(tmp_path / name).read_bytes() for name in ("metrics.jsonl", "config.yaml", "run.json")] == before
    train(tiny.config(tmp_path, "trainer.total_training_steps=3"))
    assert steps(tmp_path) == [1, 2, 3]


def test_a_stopped_run_that_is_called_complete_keeps_what_its_steps_were_made_with(tiny, tmp_path):
    def stop(event):
        if isinstance(event, StepFinished) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="stopped after step 2 of 3"):
        train(tiny.config(tmp_path, "trainer.total_training_steps=3"), stop)
    weighed = "reward_model.score_weight=2"
    train(tiny.config(tmp_path, "trainer.total_training_steps=2", weighed))
    record = read_run_record(tmp_path)
    assert (record["ended"], record["total_steps"], record.get("changed_at", 0)) == ("completed", 2, 0)


def test_a_run_with_a_critic_and_an_adaptive_kl_resumes(tiny, tmp_path):
    settings = (
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=50",
        "critic.optim.lr=1e-3",
        f"{ACTOR}.ppo_epochs=2",
        "trainer.total_training_steps=4",
    )
    train(tiny.config(tmp_path / "whole", *settings))
    train(tiny.config(tmp_path / "parts", *settings, "trainer.save_freq=2"))
    (tmp_path / "parts" / "latest_checkpointed_iteration.txt").write_text("2")
    train(tiny.config(tmp_path / "parts", *settings))
    for role in ("actor", "critic"):
        assert same(weights(tmp_path / "parts", 4, role), weights(tmp_path / "whole", 4, role))


def test_a_fresh_start_on_request_keeps_the_old_metrics_and_dumps_aside(tiny, tmp_path):
    dumps = f"trainer.rollout_data_dir={tmp_path}/rollouts"
    train(tiny.config(tmp_path, dumps, "trainer.total_training_steps=2"))
    events = []
    fresh = ("trainer.total_training_steps=1", "trainer.resume_mode=disable")
    train(tiny.config(tmp_path, dumps, *fresh), events.append)
    assert any("2 steps of an earlier run" in event.text for event in events if isinstance(event, Notice))
    assert steps(tmp_path) == list_dump_steps(tmp_path / "rollouts") == [1]
    assert (tmp_path / "metrics.1.jsonl").read_text().count("\n") == 2
    assert list_dump_steps(tmp_path / "rollouts.1") == [1, 2]
    assert f"dumps of later steps than 0, of an earlier run, are now in {tmp_path}/rollouts.1" in [
        event.text for event in events if isinstance(event, Notice)
    ]


def test_a_run_goes_on_from_a_named_checkpoint(tiny, whole, tmp_path):
    named = f"trainer.resume_from_path={whole}/global_step_4"
    train(tiny.config(tmp_path, "trainer.total_training_steps=5"))  # of this run nothing is kept in the folder's files
    train(tiny.config(tmp_path, "trainer.resume_mode=resume_path", named))
    assert steps(tmp_path) == [5, 6]
    assert list_dump_steps(tmp_path / "rollouts") == [5, 6]
    assert "resumed" not in read_run_record(tmp_path)
    assert same(weights(tmp_path, 6), weights(whole, 6))


@pytest.fixture(scope="module")
def half(tiny, tmp_path_factory):
    """A run that was stopped after two of its steps."""
    folder = tmp_path_factory.mktemp("half")
    train(tiny.config(folder, "trainer.total_training_steps=2"))
    return folder


def test_what_a_resumed_run_may_not_change_is_one_line(tiny, half, tmp_path, capsys):
    rows = read_rows(tiny.folder / "data" / "train.parquet")
    fewer = write_parquet(rows[:6], tmp_path / "fewer.parquet")
    other = write_parquet(rows[::-1], tmp_path / "other.parquet")
    corrected = {**rows[-1], "reward_model": {**rows[-1]["reward_model"], "ground_truth": "corrected"}}
    truths = write_parquet([*rows[:-1], corrected], tmp_path / "truths.parquet")
    larger_model = f"actor_rollout_ref.model.path={larger(tiny)}"
    kept = (half / "config.yaml").read_bytes()
    for override, wanted in {
        "data.train_batch_size=4": "another configuration: data.train_batch_size: 2 → 4 (the order of the rows still to",
        "trainer.seed=9": "data.seed: 1 → 9",
        "data.shuffle=false": "data.shuffle: true → false",
        f"{ACTOR}.optim.name=muon": f'{ACTOR}.optim.name: "adamw" → "muon" (the optimizer\'s state is the other one\'s)',
        larger_model: f'→ "{larger(tiny)}" (the checkpoint\'s weights were trained from the other model)',
        f"data.train_files={fewer}": "number of rows was 8 at the checkpoint and is 6 now",
        f"data.train_files={other}": f"changed since the checkpoint: {other}",
        f"data.train_files={truths}": f"changed since the checkpoint: {truths}",
        "algorithm.adv_estimator=gae": "holds no critic, and algorithm.adv_estimator=gae needs one",
    }.items():
        assert wanted in one_line_error(capsys, ["train", *tiny.arguments(half, override)])
    both = one_line_error(capsys, ["train", *tiny.arguments(half, larger_model, "data.train_batch_size=4")])
    assert "actor_rollout_ref.model.path" in both
    assert "data.train_batch_size" in both
    assert (half / "config.yaml").read_bytes() == kept
    assert steps(half) == [1, 2]


def test_a_critic_on_the_policys_trunk_resumes_with_the_same_bits(tiny, tmp_path):
    """In and after its warm-up; and it is no critic of its own."""
    common = (
        "algorithm.adv_estimator=gae",
        "critic.share_trunk=true",
        "trainer.critic_warmup=1",
        "critic.optim.lr=1e-2",
    )
    common += (f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=1e-3", "trainer.max_actor_ckpt_to_keep=null")
    train(tiny.config(tmp_path / "whole", *common, "trainer.total_training_steps=3"))
    for step in (1, 2, 3):
        train(tiny.config(tmp_path / "parts", *common, f"trainer.total_training_steps={step}"))
    assert same(weights(tmp_path / "whole", 3), weights(tmp_path / "parts", 3))
    heads = [read_state(tmp_path / each / "global_step_3" / "critic" / "state") for each in ("whole", "parts")]
    assert heads[0]["model.head.weight"].any()
    assert same(*heads)
    first, second, third = (line for line in metrics(tmp_path / "whole") if line["step"])
    assert first["critic/optimizer_steps"] > 0
    assert "actor/optimizer_steps" not in first
    assert second["critic/optimizer_steps"] == second["actor/optimizer_steps"]
    assert third["critic/values/max"] != 0
    with pytest.raises(ConfigError, match=r"critic.share_trunk: true → false"):
        train(tiny.config(tmp_path / "parts", *common, "critic.share_trunk=false", "trainer.total_training_steps=4"))


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"optim": {"name": "adamw"}}, {"optim": {"name": "muon"}}),
        ({"model": {"lora_rank": 0}}, {"model": {"lora_rank": 4}}),
    ],
)
def test_a_resumed_critic_keeps_its_optimizer_and_weights(estimator, then, now):
    """Where there is one."""
    stored, asked = ({"algorithm": {"adv_estimator": estimator}, "critic": critic} for critic in (then, now))
    [change] = compare(stored, asked)
    assert change.key.startswith("critic.")
    assert change.rule.effect is (Effect.REFUSED if estimator == "gae" else Effect.HONOURED)


@pytest.mark.parametrize(("then", "effect"), [({"lora_rank": 8}, Effect.REFUSED), ({}, Effect.HONOURED)])
def test_a_resumed_run_trains_the_same_weights(then, effect):
    stored, asked = (
        {"actor_rollout_ref": {"model": {"dtype": "float32"} | model}} for model in (then, {"lora_rank": 0})
    )
    [change] = compare(stored, asked)
    assert (change.key, change.rule.effect) == ("actor_rollout_ref.model.lora_rank", effect)


@pytest.mark.parametrize(("rank", "effect"), [(8, Effect.REFUSED), (0, Effect.HONOURED)])
@pytest.mark.parametrize(
    ("key", "then", "now"),
    [
        ("lora_alpha", 16.0, 64.0),
        ("target_modules", ["all-linear"], ["q_proj"]),
        ("exclude_modules", None, ".*visual.*"),
    ],
)
def test_a_resumed_run_has_the_same_adapters_at_the_same_scale(rank, effect, key, then, now):
    stored, asked = ({"actor_rollout_ref": {"model": {"lora_rank": rank, key: value}}} for value in (then, now))
    [change] = compare(stored, asked)
    assert (change.key, change.rule.effect) == (f"actor_rollout_ref.model.{key}", effect)


def test_a_run_whose_folder_is_renamed_has_not_changed(tiny, tmp_path):
    stored, asked = (plain(tiny.config(tmp_path / name)) for name in ("old", "new"))
    assert stored != asked
    assert [change.key for change in compare(stored, asked)] == []


CHANGED = {  # every kind of change that is honoured: it trains on other numbers than the run without it
    "weight_decay": f"{ACTOR}.optim.weight_decay=0.5",
    "betas": f"{ACTOR}.optim.betas=[0.5,0.6]",
    "lr": f"{ACTOR}.optim.lr=5e-4",
    "kl_coef": "algorithm.kl_ctrl.kl_coef=5.0",
    "estimator": "algorithm.norm_adv_by_std_in_grpo=false",
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_key_is_honoured_and_named(tiny, tmp_path, caplog, what):
    penalty = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1")
    for name in ("same", "changed"):
        train(tiny.config(tmp_path / name, *penalty, "trainer.total_training_steps=2"))
        changed = [CHANGED[what]] if name == "changed" else []
        train(tiny.config(tmp_path / name, *penalty, "trainer.total_training_steps=4", *changed))
    key = CHANGED[what].partition("=")[0]
    assert f"changed since global_step_2: {key}: " in caplog.text
    assert not same(weights(tmp_path / "same", 4), weights(tmp_path / "changed", 4))
    asked = tiny.config(tmp_path / "changed", *penalty, "trainer.total_training_steps=4", *changed)
    stored = yaml.safe_load((tmp_path / "changed" / "config.yaml").read_text())
    assert stored == plain(asked)


def test_a_scorer_edited_since_the_run_began_is_named(tiny, tmp_path, caplog):
    scorer = tmp_path / "scorer.py"
    own = (f"custom_reward_function.path={scorer}",)
    body = "def compute_score(data_source, solution_str, ground_truth):\n    return len(solution_str) % {}\n"
    scorer.write_text(body.format(3))
    train(tiny.config(tmp_path / "run", *own, "trainer.total_training_steps=1"))
    train(tiny.config(tmp_path / "run", *own, "trainer.total_training_steps=2"))
    assert "its content changed" not in caplog.text
    scorer.write_text(body.format(4))
    train(tiny.config(tmp_path / "run", *own, "trainer.total_training_steps=3"))
    assert f"its content changed since the run last started: {scorer} (custom_reward_function.path)" in caplog.text
    assert json.loads((tmp_path / "run" / "run.json").read_text())["changed_at"] == 2


def test_validations_on_other_rows_are_not_compared(tiny, tmp_path):
    """A file of another name may hold other rows, or the same; rewards of training stay as they are."""

    def after(steps, validation, *changed):
        files = (f"data.val_files={validation}", "trainer.test_freq=1", "trainer.rollout_data_dir=null")
        train(tiny.config(tmp_path / "run", *files, f"trainer.total_training_steps={steps}", *changed))
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        return record["changed_at"], record["validation_changed_at"]

    first, moved, other = (tiny.folder / "data" / "val.parquet", tmp_path / "moved.parquet", tmp_path / "other.parquet")
    shutil.copy(first, moved)
    shutil.copy(tiny.folder / "data" / "test.parquet", other)
    train(tiny.config(tmp_path / "run", f"data.val_files={first}", "trainer.total_training_steps=1"))
    assert after(2, moved) == (0, 0)
    assert after(3, other) == (0, 2)
    sampled = f"{ROLLOUT}.val_kwargs.do_sample=true"
    assert after(4, other, sampled) == (0, 3)
    weighed = "reward_model.score_weight=2"
    assert after(5, other, sampled, weighed) == (4, 4)
    assert after(6, other, sampled, weighed, f"{ROLLOUT}.temperature=0.9") == (5, 4)
    assert after(7, other, sampled, weighed, f"{ROLLOUT}.temperature=0.9", "data.max_response_length=40") == (6, 6)
    told = [each for each in describe_changes(read_run_record(tmp_path / "run")) if each.startswith("resumed after")]
    assert len(told) == 6
    assert told[-1].startswith("resumed after step 6 with other data.max_response_length, ")


def test_what_has_no_effect_is_named_and_not_written_as_if_it_had(tiny, tmp_path, caplog):
    adaptive = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=50")
    train(tiny.config(tmp_path, *adaptive, "trainer.total_training_steps=2"))
    more = ("trainer.total_training_steps=3", "algorithm.kl_ctrl.kl_coef=9", "trainer.val_before_train=false")
    train(tiny.config(tmp_path, *adaptive, *more))
    assert (
        "no effect on a resumed run: algorithm.kl_ctrl.kl_coef: 0.001 → 9.0 (the adaptive controller continues"
        in caplog.text
    )
    assert "no effect on a resumed run: trainer.val_before_train: true → false" in caplog.text
    stored = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert stored["algorithm"]["kl_ctrl"]["kl_coef"] == 0.001
    assert stored["trainer"]["val_before_train"] is True
    assert stored["trainer"]["total_training_steps"] == 3


def test_a_moved_folder_of_the_same_model_is_the_same_model(tiny, tmp_path):
    (tmp_path / "link").symlink_to(tiny.model)
    train(tiny.config(tmp_path / "run", "trainer.total_training_steps=1"))
    settings = ("trainer.total_training_steps=2", f"actor_rollout_ref.model.path={tmp_path}/link")
    train(tiny.config(tmp_path / "run", *settings))
    assert steps(tmp_path / "run") == [1, 2]


def test_one_folder_has_one_run(tiny, tmp_path, capsys, monkeypatch):
    run, tool = tmp_path / "run", Moody(tmp_path / "tool", "await asyncio.sleep(3600)", timeout=7200)
    launched = Launched(["train", *tiny.arguments(run, tool.override)], tmp_path / "log")
    while tool.count("mood") < 1:
        assert launched.process.is_alive(), launched.text()
        launched.process.join(0.05)
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "etude.trainer.run", None)  # said before the trainer is imported
        error = one_line_error(capsys, ["train", *tiny.arguments(run)])
    assert f"process {launched.process.pid} on " in error
    assert f" is training into {run}: wait for it, or set trainer.default_local_dir" in error
    launched.signal(signal.SIGKILL)
    launched.wait()
    train(tiny.config(run, "trainer.total_training_steps=1"))


def test_a_checkpoint_that_is_none_is_one_line(tiny, half, tmp_path, capsys):
    for given in (tmp_path / "nowhere", half):
        settings = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={given}")
        assert f"{given} is no checkpoint" in one_line_error(
            capsys, ["train", *tiny.arguments(tmp_path / "run", *settings)]
        )
    assert "needs trainer.resume_from_path" in one_line_error(
        capsys, ["train", *tiny.arguments(tmp_path, "trainer.resume_mode=resume_path")]
    )


def larger(tiny):
    """The folder of a wider model with the same tokenizer."""
    from etude.models import TinyModelSpec, build_tiny_model, load_tokenizer, save_pretrained

    folder = tiny.folder / "larger"
    if not folder.exists():
        tokenizer = load_tokenizer(tiny.model)
        spec = TinyModelSpec(hidden_size=80, num_layers=1, intermediate_size=96)
        save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, folder)
    return folder


def test_a_damaged_state_is_one_line(tiny, half, tmp_path):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(half, run)
    (run / "global_step_2" / "actor" / "state" / "__0_0.distcp").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"actor/state: cannot be read"):
        train(tiny.config(run))
    (run / "global_step_2" / "trainer.json").write_text('{"step": 2}')
    with pytest.raises(CheckpointError, match="does not fit"):
        train(tiny.config(run))
    (run / "latest_checkpointed_iteration.txt").write_text("seven")
    with pytest.raises(CheckpointError, match="correct or remove the file"):
        train(tiny.config(run))
