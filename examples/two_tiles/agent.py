"""Pictures of two coloured tiles, and a question about one of them, for a vision-language model of 300,000 parameters.

`prepare` makes what training starts from, all of it drawn from a seed: pictures, questions, demonstrations (most of them a
bad habit: saying red without looking), and an untrained model of Qwen2-VL's shape, whose image processor gives each tile one
token. The loop is built in.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (230, 210, 50),
    "white": (235, 235, 235),
    "black": (25, 25, 25),
    "pink": (240, 150, 190),
    "brown": (120, 75, 35),
}
SIDES = ("Left", "Right")
HABIT = "red"
LOOKS = (0.95, 0.3)  # shares of the two halves of demonstrations that look: first the skill, then mostly the habit
TILE, NOISE = 8, 12  # pixels, and by how much a channel of each may be off


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 for the colour and nothing else."""
    return float(solution_str.strip() == ground_truth)


def draw(tiles: list[str], rng: random.Random) -> bytes:
    """A PNG of the tiles side by side; with its noise, no two are alike."""
    from PIL import Image

    picture = Image.new("RGB", (TILE * len(tiles), TILE))
    for x in range(picture.width):
        for y in range(picture.height):
            colour = COLOURS[tiles[x // TILE]]
            picture.putpixel((x, y), tuple(channel + rng.randint(-NOISE, NOISE) for channel in colour))
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def question(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """A prompt, its picture, and the answer."""
    tiles, asked = [rng.choice(list(COLOURS)) for _ in SIDES], rng.randrange(len(SIDES))
    prompt = [{"role": "user", "content": f"<image>\n{SIDES[asked]}?"}]
    return prompt, [{"bytes": draw(tiles, rng)}], tiles[asked]


def row(split: str, index: int, rng: random.Random) -> dict[str, Any]:
    """A row for training or evaluation."""
    prompt, images, answer = question(rng)
    return {
        "data_source": "examples/two_tiles",
        "prompt": prompt,
        "images": images,
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index, "split": split},
    }


def demonstration(looks: bool, rng: random.Random) -> dict[str, Any]:
    """A conversation that answers what is to be seen, or red."""
    prompt, images, answer = question(rng)
    return {"messages": [*prompt, {"role": "assistant", "content": answer if looks else HABIT}], "images": images}


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Rows and demonstrations, and the model."""
    write_model(folder / "model", seed)
    tables = {}
    for split in ("train", "val", "test"):
        rng = random.Random(f"{split}/{seed}")
        tables[split] = [row(split, index, rng) for index in range(getattr(rows, split))]
    rng, count = random.Random(f"demonstrations/{seed}"), rows.demonstrations
    shown = [demonstration(rng.random() < LOOKS[2 * i // count], rng) for i in range(count)]
    return {**tables, "demonstrations": shown}


# -- the model ---------------------------------------------------------------------------------------------------------

VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = """\
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\\n" }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- "<|vision_start|><|image_pad|><|vision_end|>" if part.type == "image" else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""


def write_model(folder: Path, seed: int) -> None:
    """An untrained model of Qwen2-VL's shape, with tokenizer and image processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from etude.models import build_tiny_tokenizer, save_pretrained
    from etude.models.processor import make_processor

    if folder.exists():
        return
    tokenizer = build_tiny_tokenizer([*COLOURS, *SIDES, "user", "assistant"], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": VISION_TOKENS})
    tokenizer.chat_template = TEMPLATE
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    patches = {"patch_size": TILE // 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = AutoConfig.for_model(
        "qwen2_vl",
        text_config=text,
        vision_config={"depth": 1, "num_heads": 2, "embed_dim": 32, "hidden_size": 96, "mlp_ratio": 2, **patches},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    pixels = {"shortest_edge": TILE**2, "longest_edge": 64 * TILE**2}
    merge = {"patch_size": TILE // 2, "merge_size": 2, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessorPil(size=pixels, **merge)
    save_pretrained(model, make_processor(model.config, tokenizer, images), folder)
