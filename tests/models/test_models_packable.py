"""Whatever `enable_packing` accepts gets, packed, the log-probs of one plain forward per sequence, at lengths beyond the
configuration's windows and original length; what would not is refused before it runs."""

import copy

import pytest
import torch
import transformers as t
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.llama import modeling_llama

from etude.errors import ConfigError
from etude.inference import NativeEngine
from etude.models.packable import enable_packing, use_packing
from etude.models.packed import CausalSequences, logits_of, packed_hidden
from etude.options.model_path import longest_context

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
WINDOW = 9
ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": WINDOW}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {**ROPE, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
FEW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}

ACCEPTED = {
    "llama": t.LlamaConfig(**SIZES),
    "llama, llama3 rope": t.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama, yarn": t.LlamaConfig(**SIZES, rope_parameters={**ROPE, "rope_type": "yarn"}),
    "mistral": t.MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": t.Qwen2Config(**SIZES, **FEW),
    "qwen3": t.Qwen3Config(**SIZES, head_dim=8, **FEW),
    "gemma2": t.Gemma2Config(**SIZES, head_dim=8, sliding_window=WINDOW),
    "phi3": t.Phi3Config(**SIZES, sliding_window=WINDOW),
    "starcoder2": t.Starcoder2Config(**SIZES, sliding_window=WINDOW),
    "cohere2": t.Cohere2Config(**SIZES, sliding_window=WINDOW),
}
MODELS = {}


def built(name):
    if name not in MODELS:
        torch.manual_seed(0)
        alone = t.AutoModelForCausalLM.from_config(ACCEPTED[name], attn_implementation="eager").eval()
        packed = copy.deepcopy(alone)
        enable_packing(packed)
        MODELS[name] = alone, packed
    return MODELS[name]


@pytest.mark.parametrize("name", ACCEPTED)
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 4 * WINDOW), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_packed_log_probs_are_those_of_one_forward_per_sequence(name, lengths, seed):
    alone, packed = built(name)
    lengths = [2 * WINDOW + 1, *lengths]
    ids = torch.randint(60, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    layout = CausalSequences(lengths)
    with torch.no_grad():
        ours = logits_of(packed, packed_hidden(packed, ids, layout.position_ids(), layout)).log_softmax(-1)
        theirs = [alone(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(lengths)]
    torch.testing.assert_close(ours, torch.cat(theirs).log_softmax(-1), atol=1e-4, rtol=0)


class MaskedModel(modeling_llama.LlamaModel):
    """A window (or chunks) that only the mask has: nothing tells the attention function of it."""

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, **others):
        embeds = self.embed_tokens(input_ids)
        places = torch.arange(embeds.shape[1])[None] if position_ids is None else position_ids
        mask = self.mask(embeds, places)
        for layer in self.layers:
            embeds = layer(
                embeds,
                attention_mask=mask,
                position_ids=places,
                position_embeddings=self.rotary_emb(embeds, position_ids=places),
                **others,
            )
        return modeling_llama.BaseModelOutputWithPast(last_hidden_state=self.norm(embeds))

    def mask(self, embeds, places):
        if not self.config.sliding_window:
            return modeling_llama.create_causal_mask(self.config, embeds, None, None, places)
        return create_sliding_window_causal_mask(self.config, embeds, None, None, places)


class ChunkedModel(MaskedModel):
    def mask(self, embeds, places):
        if self.config._attn_implementation != "eager":
            return None
        at, chunk = places[0], self.config.attention_chunk_size
        seen = (at[:, None] >= at) & (at[:, None] // chunk == at // chunk)
        return torch.where(seen, 0.0, -1e30)[None, None]


def with_mask(model_class, **spans):
    class Masked(t.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model = model_class(config)
            self.post_init()

    torch.manual_seed(0)
    return Masked(t.LlamaConfig(**SIZES, **spans))


@pytest.mark.parametrize("span", [WINDOW, 4096])
def test_a_chunk_that_no_mask_function_has_is_refused_at_any_length(span):
    model = with_mask(ChunkedModel, attention_chunk_size=span)
    with pytest.raises(ConfigError, match=f"attention_chunk_size={span}.*null in the model's config.json") as error:
        enable_packing(model)
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation != "etude_packed"  # a second call refuses it again
    assert not use_packing(model)  # its own forward pass is right, one sequence at a time


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_window_that_only_the_mask_function_has_is_that_of_the_packed_attention(window):
    alone, packed = with_mask(MaskedModel, sliding_window=window), with_mask(MaskedModel, sliding_window=window)
    alone.set_attn_implementation("eager")
    enable_packing(packed)
    layout, ids = CausalSequences([WINDOW + 5, 3]), torch.arange(WINDOW + 8)
    with torch.no_grad():
        ours = logits_of(packed, packed_hidden(packed, ids, layout.position_ids(), layout))
        theirs = [alone(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(layout.lengths)]
    torch.testing.assert_close(ours, torch.cat(theirs), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "given", "longest"),
    [
        (t.LlamaConfig, {"rope_parameters": {**ROPE, "rope_type": "dynamic"}}, 2048),
        (t.LlamaConfig, {"rope_parameters": {**LONG, "original_max_position_embeddings": 64}}, 64),
        (t.Phi3Config, {"rope_parameters": LONG, "original_max_position_embeddings": 64}, 64),
    ],
)
def test_a_rotary_embedding_that_depends_on_the_batch_packs_up_to_its_original_length(config, given, longest):
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config(**SIZES, **given, max_position_embeddings=2048))
    enable_packing(model, cached=True)
    assert longest_context(model.config.to_dict()) == longest
    assert NativeEngine(model)._limit == longest


def test_a_mixture_that_no_window_separates_is_accepted_by_its_numbers_alone():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    enable_packing(t.AutoModelForCausalLM.from_config(t.MixtralConfig(**SIZES, **experts)), cached=True)


def test_a_rotary_embedding_that_changes_beyond_the_original_length_is_refused_by_its_numbers():
    """The same as longrope, under a name of its own."""
    plain = modeling_llama.LlamaRotaryEmbedding.forward

    class LlamaForCausalLM(t.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            rotary = self.model.rotary_emb
            original = config.rope_parameters["original_max_position_embeddings"]
            rotary.forward = lambda x, position_ids: plain(
                rotary, x, position_ids * (0.25 if position_ids.max() >= original else 1.0)
            )

    with pytest.raises(ConfigError, match=r"original_max_position_embeddings=4096"):
        enable_packing(
            LlamaForCausalLM(
                t.LlamaConfig(**SIZES, rope_parameters={**LLAMA3, "original_max_position_embeddings": 4096})
            )
        )


def test_queries_that_are_scaled_by_their_place_in_the_row_are_refused():
    """Llama 4 counts from the row's first token, whatever the positions are; its chunks alone would pack."""
    config = t.Llama4TextConfig(**SIZES, head_dim=8, num_local_experts=1, attention_chunk_size=8)
    with pytest.raises(ConfigError, match="floor_scale=8192"):
        enable_packing(t.AutoModelForCausalLM.from_config(config))
    config.attn_temperature_tuning = False
    enable_packing(t.AutoModelForCausalLM.from_config(config), cached=True)


def test_a_class_of_which_no_small_copy_can_be_made_is_accepted_with_a_warning(caplog):
    class Fixed(t.LlamaForCausalLM):
        def __init__(self, config):
            assert config.vocab_size == 300
            super().__init__(config)

    enable_packing(Fixed(t.LlamaConfig(**SIZES | {"vocab_size": 300}, sliding_window=4096)))
    assert "was not compared beyond sliding_window=4096" in caplog.text
