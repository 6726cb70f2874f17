"""Images in models: processors, where images stand, rotary positions, features, and packed forwards against plain ones."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from vision_stage import (
    KINDS,
    build_image_processor,
    build_vision_model,
    build_vision_stage,
    build_vision_tokenizer,
    image,
    picture,
    plain_logits,
    save_vision_model,
)

from etude.errors import ConfigError, DataError
from etude.models import (
    TinyModelSpec,
    ValueModel,
    build_tiny_model,
    build_tiny_tokenizer,
    image_input,
    load_causal_lm,
    load_processor,
    load_tokenizer,
    load_value_model,
    save_pretrained,
)
from etude.models.image_positions import ImagePositions
from etude.models.packable import enable_packing
from etude.models.packed import CausalSequences, logit_finish, logits_of, packed_hidden
from etude.models.processor import make_processor
from etude.models.vision import ImageFeatures, PlacedFeatures, Vision, image_features, no_images_error

TOKENIZER = build_vision_tokenizer()
SIZES = ((8, 8), (16, 8), (8, 24), (24, 24), (40, 16))
"""Pictures of 1, 2, 3, 9 and 10 tokens."""


@pytest.fixture(scope="module", params=KINDS)
def stage(request):
    return build_vision_stage(request.param)


def context(processor, parts):
    """Ids and images of a context: a number is that many text tokens, a pair the size of a picture."""
    ids, images = [], []
    for n, part in enumerate(parts):
        if isinstance(part, int):
            ids += [(7 * n + i) % 200 for i in range(part)]
        else:
            images.append(image(processor, *part, seed=n))
            ids += [processor.image_token_id] * images[-1].tokens
    return ids, images


contexts = st.lists(st.one_of(st.integers(1, 9), st.sampled_from(SIZES)), min_size=1, max_size=8)


# -- processors ------------------------------------------------------------------------------------------------------


def test_a_processor_writes_and_reads_itself_with_its_model(tmp_path, stage):
    model, processor = stage
    processor.video_config = {"fps": 2}
    save_pretrained(model, processor, tmp_path)
    processor.video_config = None
    again, read = load_causal_lm(tmp_path), load_processor(tmp_path)
    assert type(again) is type(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert json.loads((tmp_path / "video_preprocessor_config.json").read_text()) == {"fps": 2}
    assert read.video_config == {"fps": 2}
    assert image(read, 40, 24).digest == image(processor, 40, 24).digest
    text = "<|vision_start|><|image_pad|><|vision_end|> what"
    one, other = (each(text=[text], images=[picture(40, 24)], return_tensors="pt") for each in (processor, read))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert load_tokenizer(tmp_path).chat_template == processor.chat_template
    assert type(load_value_model(tmp_path).backbone) is type(model.base_model)


def test_a_folder_as_hubs_have_it(tmp_path):
    """Qwen2.5-VL's flat configuration with its old name of the rotary embedding, and the fast image processor's class."""
    folder = save_vision_model("qwen2_5_vl", tmp_path)
    plain = load_causal_lm(folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    section = text.pop("rope_parameters")["mrope_section"]
    text |= {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": section}}
    text = {name: value for name, value in text.items() if name not in ("model_type", "layer_types", "dtype")}
    (folder / "config.json").write_text(json.dumps(text | config))
    images = json.loads((folder / "preprocessor_config.json").read_text())
    size = images.pop("size")
    images |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    images["image_processor_type"] = "Qwen2VLImageProcessorFast"
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    processor, model = load_processor(folder), load_causal_lm(folder)
    ids, shown = context(processor, [3, SIZES[3], 2])
    with torch.no_grad():
        assert torch.equal(plain_logits(model, ids, shown), plain_logits(plain, ids, shown))
    assert image(processor, 500, 300).tokens == image(STAGES["qwen2_5_vl"][1], 500, 300).tokens


def test_transformers_own_class_gives_the_same(stage):
    """Made without its `__init__`, which wants the part for videos."""
    _, ours = stage
    theirs = object.__new__(type(ours).__mro__[1])
    vars(theirs).update(vars(ours))
    text = "a <|vision_start|><|image_pad|><|vision_end|> b <|vision_start|><|image_pad|><|vision_end|>"
    pictures = [picture(40, 24), picture(8, 16, 1)]
    one, other = (each(text=[text], images=pictures, return_tensors="pt") for each in (ours, theirs))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_image_stands_for_as_many_placeholders_as_the_processor_writes(stage):
    _, processor = stage
    for seed, size in enumerate(((8, 8), (100, 31), (3, 64), (500, 500))):
        one = picture(*size, seed)
        made = processor(text=["<|image_pad|>"], images=[one], return_tensors="pt")
        read = image_input(processor, one)
        assert made["input_ids"].tolist() == [[processor.image_token_id] * read.tokens]
        assert torch.equal(made["pixel_values"], read.pixel_values)
        assert made["image_grid_thw"].tolist() == [list(read.grid)]


def test_other_modes_of_pictures_are_read_as_rgb(stage):
    _, processor = stage
    red = Image.new("RGB", (16, 16), (255, 0, 0))
    assert image_input(processor, red.convert("P")).digest == image_input(processor, red).digest
    assert image_input(processor, red.convert("RGBA")).digest == image_input(processor, red).digest


def test_a_picture_the_processor_refuses_is_a_data_error(stage):
    with pytest.raises(DataError, match=r"a picture of 801 by 2 pixels: .*aspect ratio"):
        image_input(stage[1], Image.new("RGB", (801, 2)))


def test_videos_are_refused(stage):
    with pytest.raises(DataError, match="videos are not supported"):
        stage[1](text=["<|video_pad|>"], videos=[[picture()]])


def test_a_text_model_has_no_processor(tmp_path):
    tokenizer = build_tiny_tokenizer(["1 + 2"], 270)
    save_pretrained(build_tiny_model(TinyModelSpec(hidden_size=32, vocab_size=270), tokenizer), tokenizer, tmp_path)
    assert load_processor(tmp_path) is None


def other_model(kind, vision, **text):
    """Of another vision-language architecture."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": len(TOKENIZER), **sizes}
    vision |= {"image_size": 16, "patch_size": 4, **sizes}
    return AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, text_config=text, vision_config=vision))


def test_a_vision_model_that_only_shows_images_is_refused_when_it_is_loaded(tmp_path):
    save_pretrained(other_model("llava", {"model_type": "clip_vision_model"}, model_type="llama"), TOKENIZER, tmp_path)
    with pytest.raises(ConfigError, match=r"type 'llava' are not supported \(of those that see: qwen2_vl, qwen2_5_vl"):
        load_causal_lm(tmp_path)


def test_another_vision_model_reads_text_and_is_shown_no_images(tmp_path):
    save_pretrained(other_model("gemma3", {}, max_position_embeddings=64), TOKENIZER, tmp_path)
    model = load_causal_lm(tmp_path)
    assert load_processor(tmp_path) is None
    assert Vision.of(model.config) is None
    assert "images are not supported for model type 'gemma3', only for" in str(no_images_error(model.config))
    enable_packing(model)


def test_a_folder_without_an_image_processor_says_so(tmp_path):
    folder = save_vision_model("qwen2_5_vl", tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot load the image processor \(preprocessor_config.json\)"):
        load_processor(folder)


def test_a_broken_part_of_the_processor_says_so(tmp_path):
    folder = save_vision_model("qwen3_vl", tmp_path)
    (folder / "video_preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot load the image processor"):
        load_processor(folder)


def test_a_critic_of_a_vision_model_is_saved_and_read(tmp_path, stage):
    model, _ = stage
    critic = ValueModel(model.base_model)
    torch.nn.init.normal_(critic.head.weight)
    save_pretrained(critic, None, tmp_path)
    again = load_value_model(tmp_path)
    pairs = zip(critic.state_dict().items(), again.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_parts_that_do_not_fit_are_refused():
    tokenizer = build_vision_tokenizer()
    model = build_vision_model("qwen2_5_vl", tokenizer)
    other = build_image_processor()
    other.patch_size = 8
    with pytest.raises(ConfigError, match="the image processor's patch_size is 8, the model's 4"):
        make_processor(model.config, tokenizer, other)
    with pytest.raises(ConfigError, match=r"the tokenizer's id of <\|image_pad\|> is None, the model's"):
        make_processor(model.config, build_tiny_tokenizer(["1 + 2"], 270), build_image_processor())


# -- where images stand ----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(kind=st.sampled_from(KINDS), parts=contexts, begin=st.integers(0, 60), length=st.integers(1, 60))
def test_positions_are_the_models_own_from_any_place_on(kind, parts, begin, length):
    model, processor = STAGES[kind]
    separated = [piece for part in parts for piece in (1, part)]  # Transformers takes two adjacent images for one
    ids, images = context(processor, separated)
    placed = ImagePositions.of(ids, images, Vision.of(model.config))
    if placed is None:
        assert not images
        return
    tokens = torch.tensor([ids])
    grids = torch.tensor([each.grid for each in images])
    types = (tokens == processor.image_token_id).int()
    theirs, delta = model.model.get_rope_index(tokens, mm_token_type_ids=types, image_grid_thw=grids)
    assert torch.equal(placed.positions(0, len(ids)), theirs[:, 0])
    begin = min(begin, len(ids) - 1)
    end = min(begin + length, len(ids))
    assert torch.equal(placed.positions(begin, end), theirs[:, 0, begin:end])
    behind = placed.positions(len(ids), len(ids) + 2)  # what is sampled next
    assert torch.equal(behind, (torch.arange(2) + len(ids) + placed.shift).expand(3, -1))
    assert placed.shift == int(delta)


STAGES = {kind: build_vision_stage(kind) for kind in KINDS}


@given(parts=contexts, cut=st.integers(0, 80))
def test_keyed_ids_tell_images_apart_and_leave_text(parts, cut):
    model, processor = STAGES["qwen2_5_vl"]
    ids, images = context(processor, parts)
    placed = ImagePositions.of(ids, images, Vision.of(model.config))
    if placed is None:
        return
    keyed = placed.keyed(ids)
    assert placed.keyed(ids[:cut]) == keyed[:cut]
    assert [k if k >= 0 else processor.image_token_id for k in keyed] == ids
    assert len({k for k in keyed if k < 0}) == len({each.digest for each in images})
    other = [image(processor, *part, seed=99 + n) for n, part in enumerate(p for p in parts if not isinstance(p, int))]
    rekeyed = ImagePositions.of(ids, other, Vision.of(model.config)).keyed(ids)
    assert all((a == b) == (a >= 0) for a, b in zip(keyed, rekeyed))


@pytest.mark.parametrize(
    ("ids", "sizes"),
    [
        ("5", [(8, 8)]),
        ("5i", []),
        ("5i5i", [(8, 8)]),
        ("5i5", [(16, 8)]),
        ("5ii5", [(8, 8)]),
        ("5i5i5", [(16, 8)]),
        ("ii5", [(8, 8), (16, 8)]),
    ],
)
def test_images_without_their_placeholders_are_refused(ids, sizes):
    model, processor = STAGES["qwen3_vl"]
    tokens = [processor.image_token_id if c == "i" else int(c) for c in ids]
    with pytest.raises(
        DataError, match=rf"the context has {ids.count('i')} image placeholders .* and {len(sizes)} images"
    ):
        ImagePositions.of(tokens, [image(processor, *size) for size in sizes], Vision.of(model.config))


def test_a_videos_placeholders_are_refused():
    model, processor = STAGES["qwen3_vl"]
    with pytest.raises(DataError, match="videos are not supported"):
        ImagePositions.of([1, processor.video_token_id], [], Vision.of(model.config))


def test_what_reads_text_only_has_no_vision(model):
    assert Vision.of(model.config) is None


# -- features and forwards -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_features_do_not_depend_on_the_other_images(stage):
    model, processor = stage
    images = [image(processor, *size, seed=n) for n, size in enumerate(SIZES)]
    for one, together in zip(images, image_features(model, images)):
        (alone,) = image_features(model, [one])
        assert alone.embedding.shape == (one.tokens, 32)
        assert len(alone.deep) == len(together.deep) == (2 if model.config.model_type == "qwen3_vl" else 0)
        for a, b in zip((alone.embedding, *alone.deep), (together.embedding, *together.deep)):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_features_of_layers_may_come_for_all_images_at_once(stage, monkeypatch):
    """As Transformers 5.17 gives them."""
    model, processor = stage
    images = [image(processor, *size, seed=n) for n, size in enumerate(SIZES)]
    split, compute = image_features(model, images), model.base_model.get_image_features

    def compute_whole(*args, **options):
        made = compute(*args, **options)
        if deep := getattr(made, "deepstack_features", None):
            made.deepstack_features = [layer if isinstance(layer, torch.Tensor) else torch.cat(layer) for layer in deep]
        return made

    monkeypatch.setattr(model.base_model, "get_image_features", compute_whole)
    for one, other in zip(split, image_features(model, images)):
        assert [each.tolist() for each in one.deep] == [each.tolist() for each in other.deep]


@torch.no_grad()
def test_packed_contexts_with_images_get_the_logits_each_has_alone(stage):
    model, processor = stage
    made = [
        context(processor, [3, SIZES[3], 5, SIZES[1], 2]),
        context(processor, [4]),
        context(processor, [1, (40, 16), 6]),
    ]
    plain = torch.cat([plain_logits(model, ids, images) for ids, images in made])
    enable_packing(model)
    vision = Vision.of(model.config)
    layout = CausalSequences([len(ids) for ids, _ in made])
    positions, places, parts, offset = [], [], [], 0
    for ids, images in made:
        placed = ImagePositions.of(ids, images, vision)
        positions.append(torch.arange(len(ids)).expand(3, -1) if placed is None else placed.positions(0, len(ids)))
        for each, first, last in placed.within(0, len(ids)) if placed else ():
            places.append(torch.arange(first, last) + offset)
            parts.append(image_features(model, [each.image])[0])
        offset += len(ids)
    places, parts = places[::-1], parts[::-1]  # in any order
    shown = PlacedFeatures(torch.cat(places), ImageFeatures.concat(parts))
    ids = torch.tensor([token for row, _ in made for token in row])
    logits = model.lm_head(packed_hidden(model, ids, torch.cat(positions, dim=1)[:, None], layout, shown))
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_packed_text_gets_the_logits_each_has_alone(stage):
    """A vision-language model that is shown nothing, at one-dimensional positions."""
    model, processor = stage
    rows = [context(processor, [n])[0] for n in (5, 9)]
    plain = torch.cat([plain_logits(model, ids) for ids in rows])
    enable_packing(model)
    layout = CausalSequences([5, 9])
    hidden = packed_hidden(model, torch.tensor(rows[0] + rows[1]), layout.position_ids(), layout)
    torch.testing.assert_close(model.lm_head(hidden), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_placeholders_are_out_of_the_distribution(stage, dtype):
    model, processor = stage
    held = [processor.image_token_id, processor.video_token_id]
    logits = torch.randn(3, len(processor.tokenizer)).to(dtype)
    finished = logit_finish(model)(logits)
    probs = (finished.float() / 0.01).softmax(-1)
    assert torch.equal(probs[:, held], torch.zeros(3, 2))
    kept = [i for i in range(logits.shape[1]) if i not in held]
    assert torch.equal(finished[:, kept], logits[:, kept].float())
    hidden = torch.randn(3, 32)
    assert torch.equal(logits_of(model, hidden)[:, kept], model.lm_head(hidden)[:, kept])


def test_the_vision_tower_keeps_its_attention(stage):
    model, _ = stage
    enable_packing(model)
    assert model.config.vision_config._attn_implementation in ("eager", "sdpa")
    assert model.config.text_config._attn_implementation == model.config._attn_implementation == "etude_packed"
