"""LoRA trains what the trainer differentiates, or is refused when the adapters are made."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from etude.errors import ConfigError
from etude.models.lora import add_adapters
from etude.options import ModelOptions

pytest.importorskip("peft")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["full_attention"] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
}


def made(kind, **given):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **given))


def options(*targets, **given):
    return ModelOptions(path="model", lora_rank=2, target_modules=targets or ("all-linear",), **given)


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_of_the_head_is_refused(tied):
    """The engine would apply it, and log-probs and gradients would not know of it."""
    model = made("llama", num_hidden_layers=1, tie_word_embeddings=tied)
    with pytest.raises(ConfigError, match=r"model\.target_modules=q_proj,lm_head.*head"):
        add_adapters(model, options("q_proj", "lm_head"))


def test_adapters_that_get_no_gradient_are_refused():
    """Gemma 3n reads the weights of some linear layers without calling these."""
    with pytest.raises(ConfigError, match=r"4 adapters get no gradient.*correction_coefs.*model\.exclude_modules"):
        add_adapters(made("gemma3n_text", **GEMMA3N), options())
    add_adapters(made("gemma3n_text", **GEMMA3N), options(exclude_modules=r".*correction_coefs"))


def test_adapters_change_neither_the_weights_gradients_nor_random_numbers():
    model = made("llama", num_hidden_layers=2)
    state = torch.get_rng_state()
    add_adapters(model, options())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
