"""Training on pictures: a run from files to checkpoints with a tool that shows more of them, its repeats and its dumps."""

import base64
import json
import runpy
from pathlib import Path

import pytest
import torch
from house_stage import metrics, same, steps, weights
from vision_stage import picture, plain_log_probs, save_vision_model

from etude.cli.main import cli, run
from etude.config import compose
from etude.data.files import read_rows, write_parquet
from etude.data.prepare import pictures as task
from etude.dumps import read_rollouts, strip_pixels, trajectory_from_record
from etude.errors import ConfigError, DataError
from etude.models import ImageReader, load_causal_lm, load_processor
from etude.tools.builtin.image_zoom import crop_box
from etude.tools.builtin.images import load_image
from etude.trainer.run import train
from etude.trainer.setup import prepare
from etude.viewer.conversations import parse_conversation, sanitize_text
from etude.viewer.explain import Verdict, check_sequence

PLUGIN = '''
"""A format in which every turn of an untrained model asks for a closer look, and a score that varies."""

import zlib

from etude.chat import ParsedResponse, ToolParser
from etude.schemas import FunctionCall


@ToolParser.register("looks_KIND")
class Looks(ToolParser):
    @property
    def stop_token_ids(self):
        return tuple(range(10, 300, 9))

    def parse(self, text, tools=None):
        number = zlib.crc32(text.encode())
        left, top = number % 24, number // 24 % 24
        box = [left, top, left + 8 + number // 576 % 16, top + 8 + number // 9216 % 16]
        return ParsedResponse(text, [FunctionCall(name="image_zoom_in_tool", arguments=f'{{"bbox_2d": {box}}}')], [])


def compute_score(solution_str):
    return zlib.crc32(solution_str.encode()) % 5 / 4
'''
TOOLS = """
tools:
  - class_name: etude.tools.builtin.image_zoom.ImageZoomInTool
    config: {type: native, min_dimension: 8}
"""
SIDE = 40
FILTER = "algorithm.filter_groups"


class Stage:
    """A folder with a model, pictures, rows, a tool and a plugin."""

    def __init__(self, folder, kind):
        self.folder, self.kind, self.model = (
            folder,
            kind,
            save_vision_model(kind, folder / "model", initializer_range=0.2),
        )
        (folder / "agent.py").write_text(PLUGIN.replace("KIND", kind))
        (folder / "tools.yaml").write_text(TOOLS)
        with (folder / "train.jsonl").open("w") as file:
            for number in range(4):
                picture(SIDE, SIDE, seed=number).save(folder / f"{number}.png")
                row = {"question": f"What is in picture {number}?", "answer": "7", "image": f"{number}.png"}
                file.write(json.dumps(row) + "\n")
        self.rows = task.write([folder / "train.jsonl"], folder / "rows")["train"]

    def config(self, run_dir, *overrides):
        rollout = "actor_rollout_ref.rollout"
        return compose(
            "grpo_trainer",
            [
                f"data.train_files={self.rows}",
                "data.train_batch_size=2",
                "data.max_prompt_length=700",
                "data.max_response_length=220",
                f"actor_rollout_ref.model.path={self.model}",
                "actor_rollout_ref.actor.optim.lr=1e-3",
                f"{rollout}.n=3",
                f"{rollout}.multi_turn.tool_config_path={self.folder}/tools.yaml",
                f"{rollout}.multi_turn.format=looks_{self.kind}",
                f"{rollout}.multi_turn.max_assistant_turns=3",
                f"plugins=[{self.folder}/agent.py]",
                f"custom_reward_function.path={self.folder}/agent.py",
                "trainer.total_training_steps=3",
                f"trainer.default_local_dir={run_dir}",
                f"trainer.rollout_data_dir={run_dir}/rollouts",
                "trainer.logger=[jsonl]",
                "trainer.deterministic=true",
                "trainer.device=cpu",
                "trainer.num_threads=1",
                "trainer.save_freq=1",
                "trainer.max_actor_ckpt_to_keep=null",
                *overrides,
            ],
        )


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def stage(request, tmp_path_factory):
    return Stage(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def whole(stage, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(stage.config(folder))
    return folder


def records_of(run_dir, step):
    return list(read_rollouts(run_dir / "rollouts" / f"{step}.jsonl"))


def pictures_of(record):
    """What the model was shown, from the files and the tool's calls alone."""
    whole = load_image(record["tools_kwargs"]["image_zoom_in_tool"]["create_kwargs"]["image"], 10**6)
    crops = []
    for call in record["tool_calls"]:
        box = crop_box([float(side) for side in json.loads(call["arguments"])["bbox_2d"]], whole.size, 8)
        crops += [whole.crop(box)] if call["response"].startswith("Zoomed") else []
    return [whole, *crops][: len(record["images"])]


def test_the_dumps_log_probs_are_those_of_the_saved_model_on_the_pictures(whole):
    seen = set()
    for step in (2, 3):
        folder = whole / f"global_step_{step - 1}" / "actor" / "huggingface"
        model, reader = load_causal_lm(folder), ImageReader(load_processor(folder))
        for record in records_of(whole, step):
            trajectory = trajectory_from_record(record)
            images = [reader.read(each) for each in pictures_of(record)]
            assert [image.to_record() for image in images] == record["images"]
            ids = trajectory.prompt_ids + trajectory.response_ids
            with torch.no_grad():
                again = plain_log_probs(model, ids, images)[len(trajectory.prompt_ids) - 1 :]
            mask = torch.tensor(trajectory.response_mask).bool()
            engine = torch.tensor(trajectory.response_log_probs)
            torch.testing.assert_close(again[mask], engine[mask], atol=1e-4, rtol=0)
            seen.add(len(images))
    assert max(seen) >= 3  # the prompt's picture, and what two turns looked at


def test_the_update_moves_the_whole_model(stage, whole):
    before, after = weights(whole, 1), weights(whole, 3)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("visual" in name for name in moved)
    assert any("layers" in name and "visual" not in name for name in moved)
    assert all(record["rollout/dropped"] == 0 for record in metrics(whole))


def test_a_repeat_and_a_resumed_run_end_bit_identical(stage, whole, tmp_path):
    train(stage.config(tmp_path))
    assert same(weights(tmp_path, 3), weights(whole, 3))
    for path in (tmp_path / "rollouts").iterdir():
        path.unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")  # as if killed in step 3
    train(stage.config(tmp_path))
    assert steps(tmp_path) == [1, 2, 3]
    assert same(weights(tmp_path, 3), weights(whole, 3))
    for step in (2, 3):
        ours, theirs = (records_of(each, step) for each in (tmp_path, whole))
        assert [(r["response_ids"], r["images"]) for r in ours] == [(r["response_ids"], r["images"]) for r in theirs]


def test_dumps_say_what_was_shown_and_hold_no_pixels(stage, whole, capsys):
    record = records_of(whole, 2)[0]
    assert record["images"][0]["tokens"] == 25
    assert record["images"][0]["grid"] == [1, 10, 10]
    shown = parse_conversation(record)
    assert (
        "images",
        f"{len(record['images'])} ({', '.join(str(i['tokens']) for i in record['images'])} tokens)",
    ) in shown.facts
    assert "<|image_pad|>×25" in shown.blocks[0].text
    roles = [message["role"] for message in record["messages"]]
    assert roles[:4] == ["system", "user", "assistant", "tool"]
    assert record["messages"][1]["content"][0] == {"type": "image"}
    assert record["messages"][3]["content"][0] == {"type": "image"}
    assert run(cli, ["explain", str(whole / "rollouts" / "2.jsonl"), "--no-tokens"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"images {', '.join(str(i['tokens']) + ' tokens' for i in record['images'])}" in told
    assert "images, and a dump holds no pixels" in told


def test_bytes_in_rows_stay_out_of_dumps(stage, tmp_path):
    path = tmp_path / "bytes.jsonl"
    image = "data:image/png;base64," + base64.b64encode((stage.folder / "0.png").read_bytes()).decode()
    rows = [{"question": f"What is {n}?", "answer": "7", "image": image} for n in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = write_parquet(
        [
            {**row, "images": [{"bytes": (stage.folder / "0.png").read_bytes(), "path": None}]}
            | {"extra_info": {**row["extra_info"], "picture": image}}
            for row in read_rows(task.write([stage.folder / "train.jsonl"], tmp_path / "rows")["train"])
        ],
        tmp_path / "rows.parquet",
    )
    train(stage.config(tmp_path / "run", f"data.train_files={written}", "trainer.total_training_steps=1"))
    [line, *_] = (tmp_path / "run" / "rollouts" / "1.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["extra_info"]["picture"].keys() == {"bytes", "digest"}
    assert "base64" not in line
    assert len(record["images"]) >= 1


@pytest.mark.parametrize(
    "settings",
    [
        ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.ppo_epochs=2"),
        ("actor_rollout_ref.rollout.mode=sync", f"{FILTER}.enable=true", f"{FILTER}.max_num_gen_batches=2"),
        ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"),
    ],
    ids=["reference", "lock-step", "critic"],
)  # fmt: skip
def test_other_ways_to_train(stage, tmp_path, settings):
    if stage.kind != "qwen3_vl":
        pytest.skip("one kind is enough")
    train(stage.config(tmp_path, "trainer.total_training_steps=2", *settings))
    assert steps(tmp_path) == [1, 2]
    assert not same(weights(tmp_path, 1), weights(tmp_path, 2))


def test_rows_with_and_without_images_in_one_batch_and_validation(stage, tmp_path):
    rows = read_rows(stage.rows)
    plain = {**rows[1], "images": None, "prompt": [{"role": "user", "content": "What is 2 + 3?"}]}
    mixed = write_parquet([rows[0], plain], tmp_path / "mixed.parquet")
    only = write_parquet([plain], tmp_path / "plain.parquet")
    settings = [f"data.train_files={mixed}", f"data.val_files=[{only},{mixed}]", "data.val_batch_size=1"]
    train(stage.config(tmp_path / "run", "trainer.total_training_steps=1", *settings))
    records = records_of(tmp_path / "run", 1)
    assert {record["messages"][0]["role"] for record in records} == {"system", "user"}
    for record in records:  # both kinds are shown crops, and only one the whole picture before
        in_prompt = record["prompt_ids"].count(load_processor(stage.model).image_token_id)
        assert in_prompt == (25 if record["messages"][0]["role"] == "system" else 0)
        assert (record["images"][0]["tokens"] == 25) == (in_prompt == 25)
    assert steps(tmp_path / "run") == [0, 1]


def test_a_text_model_refuses_rows_with_images_before_it_is_loaded(stage, tiny, tmp_path):
    config = stage.config(tmp_path, f"actor_rollout_ref.model.path={tiny.model}")
    with pytest.raises(DataError, match=r"row 0: the row has images, and the model reads text only") as raised:
        train(config)
    assert "\n" not in str(raised.value)
    setup, _ = prepare(stage.config(tmp_path, f"actor_rollout_ref.model.path={tiny.model}", "data.image_key=null"))
    item = setup.dataset([str(stage.rows)])[0]
    assert item["raw_prompt"][1]["content"].startswith("<image>\n")  # as any other text


def test_what_a_dump_says_of_bytes_and_addresses():
    image = b"\x89PNG" + bytes(100)
    address = "data:image/png;base64," + "A" * 100
    said = strip_pixels(
        {"a": [{"bytes": image, "path": "a.png"}], "b": address, "c": b"short", "d": "data: " + "x" * 200}
    )
    assert said["a"] == [{"bytes": {"bytes": 104, "digest": said["a"][0]["bytes"]["digest"]}, "path": "a.png"}]
    assert (said["b"]["bytes"], said["c"], said["d"]) == (122, b"short", "data: " + "x" * 200)
    other = strip_pixels(image + b"x")
    assert other["digest"] != said["a"][0]["bytes"]["digest"] == strip_pixels(image)["digest"]


def test_many_placeholders_are_read_as_one_with_a_count():
    pads = "<|image_pad|>" * 1000
    assert (
        sanitize_text(f"a<|vision_start|>{pads}<|vision_end|>b") == "a<|vision_start|><|image_pad|>×1000<|vision_end|>b"
    )
    assert sanitize_text("<|image_pad|>" * 3) == "<|image_pad|>" * 3
    assert sanitize_text("abcabcabcabcabc") == "abcabcabcabcabc"


def test_a_record_with_images_is_not_scored_again_and_says_so(whole):
    record = records_of(whole, 2)[0]
    model = whole / "global_step_1" / "actor" / "huggingface"
    [last] = [check for check in check_sequence(record, model) if "full forward pass" in check.statement]
    assert (last.verdict, last.evidence) == (
        Verdict.SKIPPED,
        f"it saw {len(record['images'])} images, and a dump holds no pixels",
    )


def test_the_example(stage, tmp_path, monkeypatch):
    if stage.kind != "qwen3_vl":
        pytest.skip("the example is for Qwen3-VL")
    example = Path(__file__).parents[2] / "examples" / "small_print"
    names = runpy.run_path(str(example / "agent.py"))
    names["write"](tmp_path / "pictures", 8)
    answers = [json.loads(line)["answer"] for line in (tmp_path / "pictures" / "train.jsonl").read_text().splitlines()]
    score = names["compute_score"]
    assert [
        score(f"<answer>1</answer> <answer> {answers[0]} </answer>", answers[0]),
        score("<answer>1</answer>", "2"),
    ] == [1, 0.1]
    assert score(answers[0], answers[0]) == 0.0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(example.parent)
    command = ["data", "pictures", "--input", "pictures/train.jsonl", "--output-dir", "data/small_print"]
    assert run(cli, command) == 0
    settings = [
        f"actor_rollout_ref.model.path={stage.model}",
        f"plugins=[{stage.folder}/agent.py]",
        f"actor_rollout_ref.rollout.multi_turn.format=looks_{stage.kind}",  # an untrained model calls nothing by itself
        "data.max_prompt_length=900",
        "data.max_response_length=100",
        "trainer.total_training_steps=1",
        "trainer.rollout_data_dir=rollouts",
        "trainer.device=cpu",
        "trainer.logger=[jsonl]",
    ]
    train(compose("agent", settings, "examples/small_print"))
    records = list(read_rollouts(tmp_path / "rollouts" / "1.jsonl"))
    assert len(records) == 32
    assert max(len(record["images"]) for record in records) >= 2


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("vllm", "server_urls=[http://127.0.0.1:9]"),
        ("sglang", "server_urls=[http://127.0.0.1:9]"),
        ("openai", "server_urls=[http://127.0.0.1:9/v1]"),
    ],
)
def test_an_engine_that_takes_text_only_is_refused_at_start_up(stage, tmp_path, name, more):
    """Also where no row has an image: such an engine samples placeholders."""
    rollout = "actor_rollout_ref.rollout"
    message = rf"{rollout}\.name={name} takes text only, .* which needs {rollout}\.name=native"
    with pytest.raises(ConfigError, match=message):
        prepare(stage.config(tmp_path, f"{rollout}.name={name}", f"{rollout}.{more}"))
