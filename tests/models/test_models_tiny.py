"""The tiny-model factory: small, deterministic, and its template readable by a small model."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer
from etude.models.tiny import ARCHITECTURES, TAGS

TEXTS = [f'What is {n} + 7?\n<tool_call>\n{{"name": "add"}}\n</tool_call><|im_end|>' for n in range(50)]
TOKENIZER = build_tiny_tokenizer(TEXTS, 320)
SPEC = TinyModelSpec(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, vocab_size=320)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds é.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": True,
    },
}


def render(messages, tools=None, generate=True):
    return TOKENIZER.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generate)


def test_vocabulary_is_bounded_and_filled():
    rich = Path(json.__file__).read_text(encoding="utf-8").splitlines()
    assert len(build_tiny_tokenizer(rich, 320)) == 320
    assert len(build_tiny_tokenizer(["x"], 320)) == 265
    assert max(TOKENIZER.get_vocab().values()) == len(TOKENIZER) - 1


def test_vocabulary_too_small_for_bytes():
    with pytest.raises(ConfigError, match="use 265 or more"):
        build_tiny_tokenizer(TEXTS, 264)


def test_same_texts_same_tokenizer():
    again = build_tiny_tokenizer(iter(TEXTS), 320)
    assert again.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()


def test_special_and_added_tokens():
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token) == ("<|endoftext|>", "<|im_end|>")
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *TAGS):
        assert len(TOKENIZER(token)["input_ids"]) == 1
        shown = TOKENIZER.decode(TOKENIZER(token)["input_ids"], skip_special_tokens=True)
        assert shown == (token if token in TAGS else "")


def test_digits_are_single_and_no_merge_learns_a_tag():
    assert len(TOKENIZER("2024")["input_ids"]) == 4
    assert not [token for token in TOKENIZER.get_vocab() if "tool" in token and token not in TAGS]


@given(st.text(max_size=30))
@settings(deadline=None)
def test_any_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_template_lists_tools_as_signatures():
    function = TOOL["function"]
    arguments = ", ".join(f"{name}: {p['type']}" for name, p in function["parameters"]["properties"].items())
    block = f"# Tools\n<tools>\n{function['name']}({arguments}): {function['description']}\n</tools><|im_end|>\n"
    user = {"role": "user", "content": "hi"}
    turn = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render([user]) == turn
    assert render([user], [TOOL]) == f"<|im_start|>system\n{block}{turn}"
    assert render([{"role": "system", "content": "S"}, user], [TOOL]) == f"<|im_start|>system\nS\n\n{block}{turn}"
    assert render([{"role": "system", "content": "S"}, user]) == f"<|im_start|>system\nS<|im_end|>\n{turn}"
    bare = {"type": "function", "function": {"name": "now"}}
    either = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"anyOf": []}}}}}
    assert "<tools>\nnow()\nf(x: any)\n</tools>" in render([user], [bare, either])


def test_template_writes_calls_and_groups_tool_messages():
    calls = [{"function": {"name": "add", "arguments": a}} for a in ({"a": "é"}, '{"a": 2}')]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ok", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "more"},
    ]
    assert render(messages[1:4], generate=False) == (
        '<|im_start|>assistant\nok\n<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )
    assert render(messages).endswith(
        "</tool_response><|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )
    written = '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>'
    as_call = render([{"role": "assistant", "content": None, "tool_calls": calls[:1]}], generate=False)
    assert as_call == render([{"role": "assistant", "content": written}], generate=False)


def test_model_follows_the_spec():
    model = build_tiny_model(SPEC, TOKENIZER)
    assert model.config.model_type == "qwen3"
    assert model.get_input_embeddings().weight.shape == (len(TOKENIZER), 32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    default = build_tiny_model(TinyModelSpec(), TOKENIZER)
    assert 500_000 < sum(p.numel() for p in default.parameters()) < 1_000_000


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_other_architectures(architecture):
    windowed = None if architecture in ("llama", "gemma", "qwen3_moe") else 9
    spec = TinyModelSpec(**{**vars(SPEC), "architecture": architecture, "sliding_window": windowed})
    model = build_tiny_model(spec, TOKENIZER)
    assert model.config.model_type == architecture
    assert getattr(model.config, "sliding_window", None) == windowed
    kinds = getattr(model.config, "layer_types", None)
    assert architecture == "mistral" or kinds is None or set(kinds) == {"sliding_attention", "full_attention"}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    untied = build_tiny_model(TinyModelSpec(**{**vars(spec), "tie_word_embeddings": False}), TOKENIZER)
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_tiny_model(SPEC, TOKENIZER).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again = build_tiny_model(SPEC, TOKENIZER).state_dict()
    other = build_tiny_model(TinyModelSpec(**{**vars(SPEC), "seed": 1}), TOKENIZER).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_specs_that_fit_no_model():
    with pytest.raises(ConfigError, match="head size"):
        TinyModelSpec(hidden_size=100, num_heads=3)
    with pytest.raises(ConfigError, match="num_kv_heads"):
        TinyModelSpec(num_heads=4, num_kv_heads=3)
    with pytest.raises(ConfigError, match="no tiny model of architecture 'lama'; did you mean 'llama'"):
        TinyModelSpec(architecture="lama")
    with pytest.raises(ConfigError, match="architecture 'llama' has no sliding_window"):
        TinyModelSpec(architecture="llama", sliding_window=8)
    with pytest.raises(ConfigError, match="more than vocab_size 270"):
        build_tiny_model(TinyModelSpec(vocab_size=270), TOKENIZER)
