"""Images from the row to the update: what the engine saw, what was sampled and what is trained on are one conversation,
with the prompt's pictures and those that a tool showed later."""

import json
import zlib
from dataclasses import replace

import pytest
import torch
from options_stage import changed
from ranks_stage import Case, World, assert_alike
from vision_stage import picture, plain_log_probs, save_vision_model
from workers_stage import learnable, objects, started, tiny_options, update, weights_of

from etude.chat import ParsedResponse, ToolParser
from etude.models import ImageReader
from etude.options.training import ModelOptions
from etude.protocol import DataProto
from etude.schemas import FunctionCall, ImageInput
from etude.tools.builtin.image_zoom import ImageZoomInTool, crop_box
from etude.trajectory import Provenance
from etude.workers import TrainWorker

SIDE = 48


def box_of(text):
    """A box that follows from the text: somewhere in the picture, of some size."""
    number = zlib.crc32(text.encode())
    left, top = number % 24, number // 24 % 24
    return [left, top, left + 8 + number // 576 % 16, top + 8 + number // 9216 % 16]


@ToolParser.register("zooming")
class Zooming(ToolParser):
    """Many ids end a turn, so that an untrained model has several; every turn asks for a closer look."""

    @property
    def stop_token_ids(self):
        return tuple(range(10, 300, 9))

    def parse(self, text, tools=None):
        call = FunctionCall(name="image_zoom_in_tool", arguments=f'{{"bbox_2d": {box_of(text)}}}')
        return ParsedResponse(text, [call], [])


def policy(folder, kind, **model):
    """(group, its only worker) with a vision model and the zoom tool."""
    path = str(save_vision_model(kind, folder))
    options = changed(tiny_options(path), model=ModelOptions(path=path, **model))
    multi_turn = replace(options.rollout.multi_turn, format="zooming", max_assistant_turns=4)
    rollout = replace(options.rollout, prompt_length=600, response_length=300, multi_turn=multi_turn)
    tool = ImageZoomInTool({"min_dimension": 8})
    return started(changed(options, rollout=rollout), {tool.name: tool})


def row(number, pictures):
    content = [*[{"type": "image"}] * len(pictures), {"type": "text", "text": f"What is in picture {number}?"}]
    return {
        "raw_prompt": [{"role": "user", "content": content if pictures else "What is 2 + 3?"}],
        "images": pictures or None,
        "data_source": "etude/arithmetic",
        "reward_model": {"ground_truth": "7"},
        "extra_info": {"index": number},
        "tools_kwargs": {"image_zoom_in_tool": {"create_kwargs": {"image": picture(SIDE, SIDE, seed=10 * number)}}},
        "uid": f"u{number}",
    }


def prompts(n=2, seed=1):
    """Three questions, each `n` times: about a picture, about two of the same size, about none."""
    counts = (1, 2, 0)
    each = [row(i, [picture(SIDE, SIDE, seed=10 * i + k) for k in range(count)]) for i, count in enumerate(counts)]
    rows = [one | {"rollout_index": i * n + k} for i, one in enumerate(each) for k in range(n)]
    batch = DataProto.from_single_dict({key: objects([one[key] for one in rows]) for key in rows[0]})
    batch.meta_info = {"seed": seed, "validate": False}
    return batch


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def rolled(request, tmp_path_factory):
    """(group, worker, its batch ready to learn from)."""
    group, worker = policy(tmp_path_factory.mktemp(request.param), request.param)
    return group, worker, learnable(group, prompts())


def trajectories(batch):
    return [(batch[i].non_tensor_batch, batch[i].non_tensor_batch["rollout"].trajectory) for i in range(len(batch))]


def by_processor(processor, messages, pictures, tools=None):
    text = processor.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return processor(text=[text], images=pictures or None)["input_ids"][0]


def test_the_context_is_the_processors_around_what_was_sampled(rolled):
    _, worker, batch = rolled
    processor, reader = worker.bundle.processor, ImageReader(worker.bundle.processor)
    end = worker.bundle.chat.end_of_turn_id
    schemas = [ImageZoomInTool({}).get_openai_tool_schema().to_openai()]
    stub = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    shown = 0
    for columns, trajectory in trajectories(batch):
        whole = columns["tools_kwargs"]["image_zoom_in_tool"]["create_kwargs"]["image"]
        expected = list(columns["images"] or [])
        prompt = by_processor(processor, columns["raw_prompt"], expected, schemas)
        assert trajectory.prompt_ids == prompt
        calls = iter(trajectory.tool_calls)
        turn = []
        for segment in [*trajectory.segments, None]:
            if segment is not None and segment.provenance is not Provenance.SAMPLED:
                turn += segment.token_ids
                continue
            if turn:
                call = next(calls)
                crop = whole.crop(crop_box(list(map(float, json.loads(call.arguments)["bbox_2d"])), whole.size, 8))
                message = {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": call.response}]}
                ids = by_processor(processor, [*stub, message], [crop])
                after = ids.index(end, ids.index(end) + 1)
                assert turn[-len(ids) + after + 1 :] == ids[after + 1 :]
                assert turn[: after - len(ids) + 1] in ([], [end])  # where the turn did not end by itself
                expected.append(crop)
                turn = []
        assert [image.digest for image in trajectory.images] == [reader.read(each).digest for each in expected]
        shown += len(trajectory.images) - len(columns["images"] or [])
    assert shown >= 12


def test_a_full_forward_with_all_images_gives_the_engines_log_probs_and_one_with_another_does_not(rolled):
    _, worker, batch = rolled
    for _, trajectory in trajectories(batch):
        ids, mask = trajectory.prompt_ids + trajectory.response_ids, torch.tensor(trajectory.response_mask).bool()
        engine = torch.tensor(trajectory.response_log_probs)[mask]

        first, *rest = trajectory.images
        other = ImageInput.of(-first.pixel_values, first.grid, 2)
        with torch.no_grad():
            again, wrong = (
                plain_log_probs(worker.model, ids, images)[len(trajectory.prompt_ids) - 1 :][mask]
                for images in ([first, *rest], [other, *rest])
            )
        torch.testing.assert_close(again, engine, atol=1e-4, rtol=0)
        assert (wrong - engine).abs().max() > 1e-2


def test_the_trainers_log_probs_are_the_engines_and_an_update_changes_the_vision_tower(rolled):
    group, worker, batch = rolled
    columns = batch.batch
    mask = columns["response_mask"].bool()
    torch.testing.assert_close(columns["old_log_probs"][mask], columns["rollout_log_probs"][mask], atol=1e-4, rtol=0)
    before = weights_of(worker.model)
    update(group, batch)
    moved = {name for name, value in worker.model.state_dict().items() if not torch.equal(value, before[name])}
    assert any("visual.blocks" in name for name in moved)
    assert any("language_model.layers" in name for name in moved)
    worker.model.load_state_dict(before)
    group.update_weights(0)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_adapters_learn_from_images(kind, tmp_path):
    pytest.importorskip("peft")
    group, worker = policy(tmp_path, kind, lora_rank=4)
    before = weights_of(worker.model)
    for version in (1, 2):
        update(group, learnable(group, prompts(n=1)), version)
    moved = {name for name, value in worker.model.state_dict().items() if not torch.equal(value, before[name])}
    assert all(".lora_" in name for name in moved)
    assert any("visual.blocks" in name for name in moved)
    columns = learnable(group, prompts(n=1)).batch
    mask = columns["response_mask"].bool()
    torch.testing.assert_close(columns["old_log_probs"][mask], columns["rollout_log_probs"][mask], atol=1e-4, rtol=0)


def test_ranks_make_one_update_of_rows_with_images_and_without(rolled, monkeypatch):
    """With a prompt a mini-batch, one shows no image to any rank, and others show them to one rank alone."""
    _, worker, batch = rolled
    single = batch.select(deepcopy=True)
    mask = single.batch["response_mask"]
    mask[1] = 0  # its prompt's other answer was dropped
    for each in mask[4:]:  # of the prompt without a picture, what was sampled before the tool showed one
        each[int((each == 0).float().argmax()) :] = 0
    alone, *shared = [
        World(TrainWorker, worker.options, ranks).learn(monkeypatch, Case({"ppo_mini_batch_size": 1}), single)
        for ranks in (1, 2, 3)
    ]
    reached = [sum(gradient is not None for gradient in step) for step in alone[1]]
    assert len(set(reached)) == 2  # the vision tower, or not
    for each in shared:
        assert_alike(alone, each, tolerance=1e-6)


def test_answers_to_one_prompt_share_its_picture(rolled):
    _, _, batch = rolled
    images = [trajectory.images for _, trajectory in trajectories(batch)]
    assert images[0][0] is images[1][0]
    assert [image.digest for image in images[2][:2]] == [image.digest for image in images[3][:2]]
    column = batch.non_tensor_batch["multi_modal_inputs"].tolist()
    assert column == [tuple(each) for each in images]
