"""Supervised fine-tuning on conversations with images, from files to a model: what is learned, resumed and refused."""

import json
import signal

import pytest
import torch
from house_stage import Launched, metrics, one_line_error, same, steps, weights
from test_trainer_sft import KILLER
from vision_stage import picture, plain_log_probs, save_vision_model

from etude.cli.main import cli, run
from etude.config import compose
from etude.models import ImageReader, load_causal_lm, load_processor
from etude.trainer.run import fine_tune
from etude.trainer.sft import SFTTrainer
from etude.trajectory import Provenance

ZOOM = {"type": "function", "function": {"name": "zoom", "arguments": {"side": "left"}}}


def talk(number):
    """A question about an image, a call, the tool's image, and an answer; every third row is words alone."""
    if number % 3 == 2:
        return {"messages": [{"role": "user", "content": f"What is {number} + 0?"}, says(str(number))]}
    return {
        "messages": [
            {"role": "user", "content": f"<image>\nWhat is picture {number}?"},
            {"role": "assistant", "content": "", "tool_calls": [ZOOM]},
            {"role": "tool", "content": "<image>Zoomed."},
            says(f"A picture of {number}."),
        ],
        "images": [f"{number % 4}.png", {"path": "3.png"}],
    }


def says(text):
    return {"role": "assistant", "content": text}


class Stage:
    """A folder with a model, pictures and rows."""

    def __init__(self, folder, kind):
        self.folder, self.model = folder, save_vision_model(kind, folder / "model", initializer_range=0.2)
        for number in range(4):
            picture(16 + 8 * number, 24, seed=number).save(folder / f"{number}.png")
        self.rows = [talk(number) for number in range(6)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def arguments(self, run_dir, *overrides):
        return [
            f"data.train_files={self.folder}/rows.jsonl",
            "data.train_batch_size=2",
            "data.max_length=300",
            f"model.path={self.model}",
            f"trainer.default_local_dir={run_dir}",
            "trainer.total_training_steps=8",
            "trainer.save_freq=2",
            "trainer.max_actor_ckpt_to_keep=null",
            "trainer.num_threads=1",
            "trainer.device=cpu",
            "trainer.logger=[jsonl]",
            "trainer.deterministic=true",
            "optim.lr=3e-3",
            *overrides,
        ]

    def config(self, run_dir, *overrides):
        return compose("sft", self.arguments(run_dir, *overrides), root="sft")


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def stage(request, tmp_path_factory):
    return Stage(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def whole(stage, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    fine_tune(stage.config(folder))
    return folder


def test_the_first_loss_is_that_of_transformers_own_forward_on_the_pictures(stage, whole, tmp_path):
    trainer = SFTTrainer(stage.config(tmp_path))
    model, reader = load_causal_lm(stage.model), ImageReader(load_processor(stage.model))
    found = []
    for row in next(trainer.loader.cycle()):
        images = [
            reader.read(picture(16 + 8 * int(at["path"][-5]), 24, int(at["path"][-5]))) for at in row.get("images", ())
        ]
        ids = [number for run, _ in row["demonstration"] for number in run]
        learned = torch.tensor([owner is Provenance.SAMPLED for run, owner in row["demonstration"] for _ in run])
        with torch.no_grad():
            found.append(plain_log_probs(model, ids, images)[learned[1:]])
    assert metrics(whole)[0]["sft/loss"] == pytest.approx(-float(torch.cat(found).mean()), abs=1e-4)


def test_the_loss_falls_and_the_vision_tower_learns(whole):
    losses = [record["sft/loss"] for record in metrics(whole)]
    assert losses[-1] < 0.8 * losses[0]
    before, after = weights(whole, 2), weights(whole, 8)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("visual" in name for name in moved)
    assert any("layers" in name and "visual" not in name for name in moved)


def test_a_killed_and_resumed_run_ends_as_one_that_was_not(stage, whole, tmp_path):
    (tmp_path / "killer.py").write_text(KILLER)
    command = ["sft", *stage.arguments(tmp_path / "run", f"plugins=[{tmp_path}/killer.py]")]
    assert Launched(command, tmp_path / "log").wait() == -signal.SIGKILL
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "4"
    fine_tune(stage.config(tmp_path / "run"))
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert same(weights(tmp_path / "run", 8), weights(whole, 8))


def test_wrong_images_are_one_line(stage, tiny, tmp_path, capsys):
    (stage.folder / "broken.png").write_bytes((stage.folder / "0.png").read_bytes()[:60])
    for name, images in {
        "missing": ["0.png", "nowhere.png"],
        "few": ["0.png"],
        "broken": ["0.png", "broken.png"],
    }.items():
        (stage.folder / f"{name}.jsonl").write_text(json.dumps(stage.rows[0] | {"images": images}))
    one, files = "data.train_batch_size=1", f"data.train_files={stage.folder}"
    for settings, wanted in {
        (f"model.path={tiny.model}", one): "jsonl:1: the row has images, and the model reads text only",
        (f"{files}/missing.jsonl", one): "missing.jsonl:1: ",
        (f"{files}/few.jsonl", one): "few.jsonl:1: the prompt has places for 2",
        ("data.max_length=20",): "jsonl:1 has ",
    }.items():
        assert wanted in one_line_error(capsys, ["sft", *stage.arguments(tmp_path / "run", *settings)])
    assert not (tmp_path / "run").exists()
    command = ["sft", *stage.arguments(tmp_path / "run", f"{files}/broken.jsonl", one)]
    assert "broken.jsonl:1: image 1: " in one_line_error(capsys, command)


def test_without_an_image_column_the_places_are_text(stage, tmp_path):
    trainer = SFTTrainer(stage.config(tmp_path, "data.image_key=null"))
    pad = trainer.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for example in trainer.examples:
        assert not any(pad in run for run, _ in example["demonstration"])
    assert (
        run(cli, ["sft", *stage.arguments(tmp_path / "run", "data.image_key=null", "trainer.total_training_steps=1")])
        == 0
    )
