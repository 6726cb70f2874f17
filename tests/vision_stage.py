"""The stage of tests with images: tiny random vision-language models of the supported shapes, with processor and template.

A folder that `save_vision_model` writes is a whole model: config, weights (float32), tokenizer, chat template with
content parts, and image processor. A merged token covers 8 by 8 pixels; a picture takes from 1 to 64 of them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from etude.models import build_tiny_tokenizer, image_input, save_pretrained
from etude.models.processor import make_processor

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PATCH, MERGE = 4, 2
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEXTS = (
    "What is in the picture? Look closely at the left half and zoom in where you need to.",
    '{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 16, 16], "label": "a red square"}}',
    "The square is red, the circle is blue, the answer is 7.",
)

TEMPLATE = """\
{%- macro shown(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {%- if part.type == "image" or "image" in part %}{{- "<|vision_start|><|image_pad|><|vision_end|>" }}
            {%- elif part.type == "video" or "video" in part %}{{- "<|vision_start|><|video_pad|><|vision_end|>" }}
            {%- else %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set first = messages[0] %}
{%- if tools or first.role == "system" %}
    {{- "<|im_start|>system\\n" }}
    {%- if first.role == "system" %}{{- shown(first.content) }}{%- endif %}
    {%- if tools %}
        {{- "\\n# Tools\\n<tools>" }}
        {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
        {{- "\\n</tools>" }}
    {%- endif %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- "<|im_start|>assistant\\n" + shown(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- "\\n<tool_call>\\n" + ({"name": function.name, "arguments": function.arguments} | tojson) }}
            {{- "\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
        {{- "\\n<tool_response>\\n" + shown(message.content) + "\\n</tool_response>" }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- "<|im_end|>\\n" }}{%- endif %}
    {%- elif not (loop.first and message.role == "system") %}
        {{- "<|im_start|>" + message.role + "\\n" + shown(message.content) + "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""


def build_vision_tokenizer(texts=TEXTS, vocab_size=320):
    """The house's tiny tokenizer with the tokens of Qwen's vision models and a template that shows images."""
    tokenizer = build_tiny_tokenizer(texts, vocab_size - len(VISION_TOKENS))
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_image_processor():
    """Pictures from 8 by 8 to 64 by 64 pixels, whatever their size was."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    )


def build_vision_model(kind, tokenizer, *, seed=0, initializer_range=0.3, max_position_embeddings=1024):
    """A random model of `kind`, float32, in evaluation mode; the large range makes wrong attention and positions show."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        "initializer_range": initializer_range,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2}
    vision["initializer_range"] = initializer_range
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    if kind == "qwen3_vl":
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        text |= {"head_dim": 16}
    config = AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).to(torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval()


def build_vision_stage(kind, *, seed=0, **sizes):
    """(model, processor) of `kind`."""
    tokenizer = build_vision_tokenizer()
    model = build_vision_model(kind, tokenizer, seed=seed, **sizes)
    return model, make_processor(model.config, tokenizer, build_image_processor())


def save_vision_model(kind, folder, *, seed=0, **sizes):
    """Writes a model's folder and returns it."""
    model, processor = build_vision_stage(kind, seed=seed, **sizes)
    save_pretrained(model, processor, folder)
    return Path(folder)


def picture(width=16, height=16, seed=0):
    """Noise: no two pictures are alike, and every patch differs from its neighbours."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def image(processor, width=16, height=16, seed=0):
    """A picture as the engines take it."""
    return image_input(processor, picture(width, height, seed))


def plain_logits(model, ids, images=()):
    """Logits (tokens, vocabulary), on the CPU, of Transformers' own forward over one context: eager attention, its own
    positions.

    What is never sampled (placeholders of images and videos) is the engines' affair: see `plain_log_probs`.
    """
    tokens = torch.tensor([list(ids)])
    media = {}
    if images:
        media = {
            "pixel_values": torch.cat([each.pixel_values for each in images]),
            "image_grid_thw": torch.tensor([each.grid for each in images]),
            "mm_token_type_ids": (tokens == model.config.image_token_id).int(),
        }
    previous = {
        "": model.config._attn_implementation,
        "text_config": model.config.text_config._attn_implementation,
        "vision_config": model.config.vision_config._attn_implementation,
    }
    model.set_attn_implementation("eager")
    model.model.rope_deltas = None
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **media}
    try:
        inputs = {name: each.to(model.device) for name, each in inputs.items()}
        return model(**inputs, use_cache=False).logits[0].cpu()
    finally:
        model.set_attn_implementation(previous)


def plain_log_probs(model, ids, images=()):
    """Log-probs of ids[1:], (tokens - 1,), by `plain_logits` without the ids that stand for pictures."""
    logits = plain_logits(model, ids, images)[:-1].float()
    logits[:, [model.config.image_token_id, model.config.video_token_id]] = float("-inf")
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(list(ids)[1:])[:, None])[:, 0]
