"""Supervised fine-tuning: what is learned, the wished window of success, and what it leaves behind."""

import json
import signal
import threading

import pytest
import torch
from house_stage import TOOLS, Launched, by_heart, metrics, one_line_error, same, steps, weights
from safetensors.torch import load_file
from trainer_tools import Moody
from vision_stage import save_vision_model

from etude.cli.main import cli, run
from etude.config import compose
from etude.data.files import read_rows, write_parquet
from etude.errors import ConfigError, DataError, EtudeError, TrainingStopped
from etude.models import load_causal_lm, load_tokenizer, save_pretrained
from etude.trainer.rollouts import rollout_batch
from etude.trainer.run import fine_tune
from etude.trainer.sft import SFTTrainer
from etude.training import demonstrations_to_batch
from etude.workers import TrainWorker


def arguments(tiny, folder, *overrides):
    return [
        f"data.train_files={tiny.folder}/by_heart.parquet",
        "data.train_batch_size=4",
        "data.max_length=160",
        f"model.path={tiny.model}",
        f"multi_turn.tool_config_path={TOOLS}",
        f"trainer.default_local_dir={folder}",
        "trainer.total_training_steps=3",
        "trainer.num_threads=1",
        "trainer.logger=[jsonl]",
        "trainer.deterministic=true",
        "optim.lr=1e-3",
        *overrides,
    ]


def config(tiny, folder, *overrides):
    return compose("sft", arguments(tiny, folder, *overrides), root="sft")


def trial(tiny, low, high, *more):
    window = (f"target_success.low={low}", f"target_success.high={high}", "target_success.every=1")
    files = f"target_success.data_files={tiny.folder}/data/val.parquet"
    return (files, *window, "target_success.samples=3", "target_success.max_response_length=48", *more)


def test_what_it_took_is_told_in_hours(tiny, tmp_path):
    fine_tune(config(tiny, tmp_path, "trainer.total_training_steps=2"))
    totals = json.loads((tmp_path / "run.json").read_text())["totals"]
    taken = sum(record["timing_s/step"] for record in metrics(tmp_path))
    assert totals["hours"] == pytest.approx(taken / 3600, abs=1e-6)


def test_only_the_assistants_tokens_are_learned(tiny, tmp_path):
    trainer = SFTTrainer(config(tiny, tmp_path))
    tokenizer = load_tokenizer(tiny.model)
    batch = demonstrations_to_batch([trainer.examples[0]["demonstration"]], tokenizer.pad_token_id).batch
    mask = batch["response_mask"][0].bool()
    learned, given = (tokenizer.decode(batch["input_ids"][0][chosen]) for chosen in (mask, ~mask))
    row = by_heart(0)["messages"]
    assert '"expression": "2 + 3"' in learned
    assert row[-1]["content"] in learned
    assert row[1]["content"] not in learned
    assert row[1]["content"] in given
    assert "<tool_response>" in given
    assert "<tool_response>" not in learned


def test_the_loss_falls_and_two_runs_are_bit_identical(tiny, tmp_path):
    folders = [fine_tune(config(tiny, tmp_path / name)) for name in "ab"]
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert same(first, second)
    assert not same(first, load_file(tiny.model / "model.safetensors"))
    losses = [record["sft/loss"] for record in metrics(tmp_path / "a")]
    assert losses[-1] < losses[0]
    load_causal_lm(folders[0])
    load_tokenizer(folders[0])
    left = {path.name for path in (tmp_path / "a").iterdir()} - {"latest_checkpointed_iteration.txt", ".lock"}
    assert left == {"config.yaml", "global_step_3", "huggingface", "metrics.jsonl", "run.json"}


def test_the_last_snapshot_in_the_window_stays_whatever_comes_after(tiny, tmp_path, monkeypatch):
    successes = iter([0.3, 0.9, 0.35, 0.1])
    written = []
    monkeypatch.setattr(SFTTrainer, "_try_out", lambda self, rows, step: {"reward/success/mean": next(successes)})
    monkeypatch.setattr(SFTTrainer, "_write", lambda self, folder: written.append(len(metrics(tmp_path)) + 1))
    fine_tune(config(tiny, tmp_path, *trial(tiny, 0.2, 0.4, "trainer.total_training_steps=4")))
    assert written == [1, 3]
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_window_that_is_entered_leaves_a_model(tiny, tmp_path):
    folder = fine_tune(config(tiny, tmp_path, *trial(tiny, 0.0, 1.0)))
    assert folder == tmp_path / "huggingface"
    assert "reward/success/mean" in metrics(tmp_path)[-1]


def test_a_window_that_is_never_entered_leaves_nothing(tiny, tmp_path):
    with pytest.raises(EtudeError, match=r"success never lay within target_success \[0.98, 0.99\]; measured 0.\d\d, "):
        fine_tune(config(tiny, tmp_path, *trial(tiny, 0.98, 0.99)))
    assert not (tmp_path / "huggingface").exists()
    assert not list(tmp_path.glob(".incomplete*"))


def test_the_runs_seed_reaches_the_trials(tiny, tmp_path, monkeypatch):
    drawn = []

    def spy(rows, **given):
        drawn.append(given["seed"])
        return rollout_batch(rows, **given)

    monkeypatch.setattr("etude.trainer.sft.rollout_batch", spy)
    once = ("trainer.total_training_steps=1", *trial(tiny, 0.0, 1.0))
    for seed in (1, 1, 2):
        fine_tune(config(tiny, tmp_path / str(len(drawn)), *once, f"trainer.seed={seed}"))
    assert drawn[0] == drawn[1] != drawn[2]


CURIOUS = """
from etude.agents.interactions import BaseInteraction


class Curious(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "", 5.0, {}
"""


def test_trials_talk_to_the_configured_user(tiny, tmp_path):
    rows = read_rows(tiny.folder / "data" / "val.parquet")
    for row in rows:
        row["extra_info"].pop("need_tools_kwargs", None)
        row["extra_info"].pop("tools_kwargs", None)
        row["extra_info"]["interaction_kwargs"] = {"name": "curious"}
    path = write_parquet(rows, tmp_path / "asked.parquet")
    (tmp_path / "curious.py").write_text(CURIOUS)
    (tmp_path / "users.yaml").write_text("interaction: [{name: curious, class_name: 'curious.py:Curious'}]")
    settings = (
        f"target_success.data_files={path}",
        f"multi_turn.interaction_config_path={tmp_path}/users.yaml",
        "multi_turn.tool_config_path=null",
        "trainer.total_training_steps=1",
    )
    fine_tune(config(tiny, tmp_path / "run", *trial(tiny, 0.0, 1.0, *settings)))
    assert metrics(tmp_path / "run")[-1]["reward/total/mean"] > 0  # of those that came to an end


def test_a_plugin_is_imported(tiny, tmp_path):
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'seen')!r}, 'w').close()\n")
    SFTTrainer(config(tiny, tmp_path / "run", f"plugins=[{tmp_path}/own.py]"))
    assert (tmp_path / "seen").exists()


def test_trials_on_rows_of_a_source_of_ones_own_are_scored_by_a_plugin(tiny, tmp_path):
    """Of `custom_reward_function` this command has no key."""
    rows = [row | {"data_source": "mine"} for row in read_rows(tiny.folder / "data" / "val.parquet")]
    path = write_parquet(rows, tmp_path / "mine.parquet")
    given = (f"target_success.data_files={path}", "trainer.total_training_steps=1")
    with pytest.raises(ConfigError, match=r"SCORERS.register\('mine'\) in a file of `plugins`"):
        fine_tune(config(tiny, tmp_path / "run", *trial(tiny, 0.9, 1.0, *given)))
    (tmp_path / "own.py").write_text(
        "from etude.rewards import SCORERS\n\n\n@SCORERS.register('mine')\ndef score(text, truth):\n    return 1.0\n"
    )
    fine_tune(config(tiny, tmp_path / "run", *trial(tiny, 0.9, 1.0, *given), f"plugins=[{tmp_path}/own.py]"))
    assert metrics(tmp_path / "run")[-1]["reward/total/mean"] == 1


def test_more_trials_than_rows_are_refused(tiny, tmp_path, capsys):
    arguments_ = arguments(tiny, tmp_path / "run", *trial(tiny, 0.0, 1.0, "target_success.samples=50"))
    error = one_line_error(capsys, ["sft", *arguments_])
    assert error == f"target_success.samples=50, but {tiny.folder}/data/val.parquet has only 3 rows that fit"


def test_a_fresh_start_or_a_named_checkpoint_is_what_was_asked_for(tiny, tmp_path):
    fine_tune(config(tiny, tmp_path / "first", "trainer.total_training_steps=2", "trainer.save_freq=1"))
    fine_tune(config(tiny, tmp_path / "first", "trainer.resume_mode=disable"))
    assert steps(tmp_path / "first") == [1, 2, 3]  # not 3 alone: the earlier metrics were put aside
    again = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/first/checkpoints.1/global_step_2",
    )
    fine_tune(config(tiny, tmp_path / "second", *again))
    assert steps(tmp_path / "second") == [3]


def test_a_trial_that_is_lost_is_no_zero(tiny, tmp_path):
    tool = Moody(tmp_path / "tool", "pass")
    code = (tmp_path / "tool" / "moody.py").read_text()
    (tmp_path / "tool" / "moody.py").write_text(code.replace('note("create")', 'raise OSError("no tools today")'))
    override = tool.override.replace("actor_rollout_ref.rollout.", "")
    with pytest.raises(EtudeError, match=r"all 3 trial rollouts were dropped; .*no tools today"):
        fine_tune(config(tiny, tmp_path / "run", *trial(tiny, 0.0, 1.0), override))


@pytest.mark.slow
def test_an_interrupted_run_leaves_the_model_of_its_last_step(tiny, tmp_path):
    endless = ("trainer.total_training_steps=5000", "trainer.total_epochs=5000")
    launched = Launched(["sft", *arguments(tiny, tmp_path / "run", *endless)], tmp_path / "log")
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not steps(tmp_path / "run"):
        assert launched.process.is_alive(), launched.text()
        launched.process.join(0.05)
    launched.signal(signal.SIGINT)
    assert launched.wait() == 130
    assert f"stopped after step {steps(tmp_path / 'run')[-1]} of 5000" in launched.text()
    load_causal_lm(tmp_path / "run" / "huggingface")


def test_wrong_input_is_one_line(tiny, tmp_path, capsys):
    broken = write_parquet([{"messages": [{"role": "user", "content": "hi"}]}], tmp_path / "broken.parquet")
    for override, wanted in {
        "optim.learning_rate=1": "unknown key optim.learning_rate",
        "data.train_batch_size=0": "data.train_batch_size must be a whole number of at least 1",
        "data.max_length=20": "by_heart.parquet: row 0 has ",
        "model.path=null": "model.path is not set",
        "data.train_files=/nowhere.parquet": "/nowhere.parquet",
        f"data.train_files={broken}": "broken.parquet",
        "multi_turn.format=hermess": "nothing is registered as 'hermess'; did you mean 'hermes'?",
        "optim.lr_decay_ratio=2": "optim.lr_decay_ratio must be a number above 0 to 1, got 2",
    }.items():
        assert wanted in one_line_error(capsys, ["sft", *arguments(tiny, tmp_path / "run", override)])
    assert not (tmp_path / "run").exists()


def test_the_command_says_where_the_model_is(tiny, tmp_path, capsys):
    assert run(cli, ["sft", *arguments(tiny, tmp_path)]) == 0
    assert capsys.readouterr().out == f"model: {tmp_path}/huggingface\n"


KILLER = """
import os, signal
from etude.trainer import sft

step = sft.SFTTrainer._update

def step_or_die(self, rows):
    if self.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, rows)

sft.SFTTrainer._update = step_or_die
"""
LONG = (
    "trainer.total_training_steps=8",  # more than an epoch of 24 rows, whose order is drawn anew
    "trainer.save_freq=2",
    "optim.lr_scheduler_type=linear",
    "optim.lr_warmup_steps=2",
)


@pytest.mark.slow
@pytest.mark.parametrize("window", [(), trial])
def test_a_killed_and_resumed_run_ends_as_one_that_was_not(tiny, tmp_path, window):
    settings = LONG + (trial(tiny, 0.0, 1.0) if window else ())
    whole = fine_tune(config(tiny, tmp_path / "whole", *settings))
    killer = tmp_path / "killer.py"
    killer.write_text(KILLER)
    command = ["sft", *arguments(tiny, tmp_path / "run", *settings, f"plugins=[{killer}]")]
    assert Launched(command, tmp_path / "log").wait() == -signal.SIGKILL
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "4"
    resumed = fine_tune(config(tiny, tmp_path / "run", *settings))
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, resumed))
    assert same(first, second)
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6, 7, 8]
    for name in ("sft/loss", "reward/success/mean"):
        ours, theirs = ([r.get(name) for r in metrics(tmp_path / each)] for each in ("run", "whole"))
        assert ours == theirs


def test_a_save_in_the_background_is_of_its_step(tiny, tmp_path, monkeypatch):
    """The first save begins to write only when the second step is done."""
    settings = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null")
    fine_tune(config(tiny, tmp_path / "whole", *settings))
    trained, save, step = threading.Event(), TrainWorker.save_checkpoint, SFTTrainer._update

    def save_late(self, folder):
        assert trained.wait(60)
        save(self, folder)

    def stepped(self, rows):
        made = step(self, rows)
        if self.step == 1:
            trained.set()
        return made

    monkeypatch.setattr(TrainWorker, "save_checkpoint", save_late)
    monkeypatch.setattr(SFTTrainer, "_update", stepped)
    fine_tune(config(tiny, tmp_path / "run", *settings, "trainer.async_save=true"))
    for number in (1, 2, 3):
        assert same(weights(tmp_path / "run", number), weights(tmp_path / "whole", number))
    first, second = (load_file(tmp_path / name / "huggingface" / "model.safetensors") for name in ("run", "whole"))
    assert same(first, second)


def test_a_finished_run_trains_no_more_and_a_longer_one_goes_on(tiny, tmp_path):
    fine_tune(config(tiny, tmp_path))
    before = (tmp_path / "config.yaml").read_bytes(), (tmp_path / "huggingface" / "model.safetensors").read_bytes()
    fine_tune(config(tiny, tmp_path, "trainer.save_freq=7"))
    assert steps(tmp_path) == [1, 2, 3]
    assert ((tmp_path / "config.yaml").read_bytes(), before[1]) == before
    fine_tune(config(tiny, tmp_path, "trainer.total_training_steps=4"))
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_run_of_another_model_is_not_resumed(tiny, tmp_path, capsys):
    fine_tune(config(tiny, tmp_path))
    kept = (tmp_path / "config.yaml").read_bytes()
    error = one_line_error(capsys, ["sft", *arguments(tiny, tmp_path, f"model.path={tiny.folder}/model")])
    assert "was made with another configuration: model.path: " in error
    assert (tmp_path / "config.yaml").read_bytes() == kept


def test_every_row_is_learned_in_every_epoch_and_in_another_order(tiny, tmp_path, monkeypatch):
    path = write_parquet([by_heart(n) for n in range(5)], tmp_path / "five.parquet")
    settings = (f"data.train_files={path}", "trainer.total_training_steps=null", "trainer.total_epochs=3")
    for shuffle in ("true", "false"):
        trainer = SFTTrainer(
            config(tiny, tmp_path / shuffle, *settings, "data.train_batch_size=2", f"data.shuffle={shuffle}")
        )
        for number, row in enumerate(trainer.examples):
            row["number"] = number
        seen = []
        monkeypatch.setattr(
            trainer, "_update", lambda rows, seen=seen: seen.append([row["number"] for row in rows]) or {}
        )
        monkeypatch.setattr(trainer, "_write", lambda folder: None)
        trainer.fit()
        assert [len(batch) for batch in seen] == [2, 2, 1] * 3
        epochs = [[*seen[i], *seen[i + 1], *seen[i + 2]] for i in (0, 3, 6)]
        assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
        assert (len(set(map(tuple, epochs))) > 1) == (shuffle == "true")


def demonstration(question, answer, **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def vision_config(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return compose(
        "sft",
        [
            f"data.train_files={folder}/rows.jsonl",
            "data.train_batch_size=2",
            "data.max_length=900",
            f"model.path={save_vision_model('qwen2_5_vl', folder / 'model')}",
            f"trainer.default_local_dir={folder}/run",
            "trainer.total_training_steps=1",
            "trainer.num_threads=1",
            "trainer.device=cpu",
            "trainer.logger=[jsonl]",
        ],
        root="sft",
    )


def test_demonstrations_that_spell_a_placeholder_are_learned_as_text(tmp_path):
    spelled = "<|vision_start|><|image_pad|><|vision_end|> <|video_pad|>"
    tool = {"type": "function", "function": {"name": "look", "description": spelled, "parameters": {"type": "object"}}}
    rows = [
        demonstration(f"What does {spelled} mean?", "A picture.", tools=[tool]),
        demonstration("Which token is it?", f"It is {spelled}."),
    ]
    settings = vision_config(tmp_path, rows)
    trainer = SFTTrainer(settings)
    pads = {trainer.tokenizer.convert_tokens_to_ids(token) for token in ("<|image_pad|>", "<|video_pad|>")}
    for row, count in zip(trainer.examples, (2, 1)):
        ids = [number for run, _ in row["demonstration"] for number in run]
        assert not pads & set(ids)
        assert trainer.tokenizer.decode(ids).count(spelled) == count
    load_causal_lm(fine_tune(settings))
    assert metrics(tmp_path / "run")[-1]["sft/loss"] > 0


def test_a_demonstration_that_is_no_conversation_is_named(tiny, tmp_path):
    twice = {"role": "assistant", "content": "Yes."}
    rows = [demonstration("Hi.", "Yes."), {"messages": [{"role": "user", "content": "Hi."}, twice, twice]}]
    path = write_parquet(rows, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"twice\.parquet: row 1: .*assistant"):
        SFTTrainer(config(tiny, tmp_path / "run", f"data.train_files={path}"))


def test_a_demonstration_that_calls_a_tool_which_is_not_there_is_named(tiny, tmp_path, caplog):
    call = {"type": "function", "function": {"name": "calculater", "arguments": {"expression": "1 + 1"}}}
    row = demonstration("1 + 1?", "2")
    row["messages"].insert(1, {"role": "assistant", "content": "", "tool_calls": [call]})
    row["messages"].insert(2, {"role": "tool", "content": "2"})
    (tmp_path / "calls.jsonl").write_text(json.dumps(row) + "\n")
    SFTTrainer(config(tiny, tmp_path / "run", f"data.train_files={tmp_path}/calls.jsonl", "data.train_batch_size=1"))
    said = "calls.jsonl:1 calls 'calculater', and the tools are calculator; did you mean 'calculator'?; nothing to do"
    assert said in caplog.text
    call["function"] = {"name": "calculator", "arguments": {"expresion": "1 + 1"}}
    (tmp_path / "calls.jsonl").write_text(json.dumps(row) + "\n")
    SFTTrainer(config(tiny, tmp_path / "run", f"data.train_files={tmp_path}/calls.jsonl", "data.train_batch_size=1"))
    said = "calls 'calculator' with 'expresion', and its arguments are expression; did you mean 'expression'?"
    assert said in caplog.text
    (tmp_path / "calls.jsonl").write_text(json.dumps(demonstration("1 + 1?", "")) + "\n")
    SFTTrainer(config(tiny, tmp_path / "run", f"data.train_files={tmp_path}/calls.jsonl", "data.train_batch_size=1"))
    assert "calls.jsonl:1 ends in an empty answer: the model learns to say nothing" in caplog.text


@pytest.mark.parametrize("told", ["You count.", "You count with calculator(expression)."])
def test_a_demonstration_that_calls_a_tool_which_no_prompt_shows_is_named(tiny, tmp_path, caplog, told):
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1 + 1"}}}
    row = demonstration("1 + 1?", "2")
    row["messages"].insert(0, {"role": "system", "content": told})
    row["messages"].insert(2, {"role": "assistant", "content": "", "tool_calls": [call]})
    row["messages"].insert(3, {"role": "tool", "content": "2"})
    (tmp_path / "calls.jsonl").write_text(json.dumps(row) + "\n")
    without = ("data.train_batch_size=1", "multi_turn.tool_config_path=null")
    SFTTrainer(config(tiny, tmp_path / "run", f"data.train_files={tmp_path}/calls.jsonl", *without))
    said = "jsonl:1 calls 'calculator', and the prompt shows no tool: the model learns to call what it is not shown"
    assert (said in caplog.text) == (told == "You count.")


def test_a_model_whose_gradients_are_never_finite_ends_the_run(tiny, tmp_path):
    tokenizer, model = load_tokenizer(tiny.model), load_causal_lm(tiny.model)
    with torch.no_grad():
        model.get_input_embeddings().weight[:] = float("inf")
    save_pretrained(model, tokenizer, tmp_path / "broken")
    run_dir = tmp_path / "run"
    with pytest.raises(
        TrainingStopped, match=r"of the policy were not finite in the last 2 .*trainer\.max_skipped_steps"
    ):
        fine_tune(config(tiny, run_dir, f"model.path={tmp_path}/broken", "trainer.max_skipped_steps=2"))
    assert [record["sft/skipped_steps"] for record in metrics(run_dir)] == [1, 1]
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert not (run_dir / "huggingface").exists()
