"""The written-out forward pass: equal to Transformers' own, and left alone where a model is not what it was written for."""

import pytest
import torch
from torch import nn

from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer
from etude.models.decoder import PlainDecoder
from etude.models.packable import enable_packing
from etude.models.packed import CausalSequences, packed_hidden

TOKENIZER = build_tiny_tokenizer(["1 + 2"], 270)
LENGTHS = [9, 1, 14]


def tiny(architecture, window=None, **options):
    spec = TinyModelSpec(
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=270,
        architecture=architecture,
        sliding_window=window,
        initializer_range=0.15,
        **options,
    )
    model = build_tiny_model(spec, TOKENIZER).eval()
    with torch.no_grad():  # norms of one and biases of zero would hide a swapped one
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    enable_packing(model)
    return model


def both(model):
    ids, layout = torch.arange(sum(LENGTHS)) * 37 % 270, CausalSequences(LENGTHS)
    decoder = PlainDecoder.of(model)
    assert decoder is not None
    with torch.inference_mode():
        theirs = packed_hidden(model, ids, layout.position_ids(), layout)
        return decoder.hidden(ids, layout.position_ids(), layout), theirs


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_hidden_states_equal_those_of_transformers(architecture, window):
    if architecture == "llama" and window:
        pytest.skip("Llama has no windows")
    ours, theirs = both(tiny(architecture, window))
    assert float((ours - theirs).abs().max()) <= 2e-5 * float(theirs.abs().max())


def test_a_window_is_seen():
    narrow, wide = both(tiny("mistral", 2))[0], both(tiny("mistral"))[0]
    assert narrow.shape == wide.shape
    assert not torch.allclose(narrow, wide, atol=1e-3)


def test_parameters_are_those_of_the_call():
    model = tiny("qwen3")
    before, _ = both(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.1
    after, theirs = both(model)
    assert float((after - theirs).abs().max()) <= 2e-5 * float(theirs.abs().max())
    assert not torch.allclose(before, after, atol=1e-3)


def adapted(model):
    """A projection with something behind it, as adapters replace it."""
    layer = model.model.layers[1].self_attn
    layer.q_proj = nn.Sequential(layer.q_proj, nn.Identity())


def hooked(model):
    model.model.layers[2].mlp.register_forward_hook(lambda *_: None)


def renormed(model):
    model.model.norm = nn.LayerNorm(32)


def halved(model):
    model.to(torch.bfloat16)


def reactivated(model):
    model.config.hidden_act = "gelu"


def namesake(part, **methods):
    """Makes `part` one of a class of the same name, as the code beside a checkpoint has it."""
    own = type(part)
    part.__class__ = type(own.__name__, (own,), {"__module__": "transformers_modules.fork.modeling", **methods})


def forked(model):
    mlp = model.model.layers[0].mlp
    plain = type(mlp).forward
    namesake(mlp, forward=lambda self, x: plain(self, x) * 2)


def forked_whole(model):
    namesake(model)


def forked_layer(model):
    namesake(model.model.layers[2])


def reembedded(model):
    namesake(model.model.rotary_emb)


def patched(model):
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) * 2


def partly_halved(model):
    model.model.layers[1].mlp.down_proj.to(torch.bfloat16)


CHANGES = [adapted, hooked, renormed, halved, reactivated, forked, forked_whole, forked_layer, reembedded, patched]
CHANGES += [partly_halved]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_another_is_left_to_transformers(change):
    model = tiny("qwen3")
    decoder = PlainDecoder.of(model)
    assert decoder is not None
    assert decoder.is_current()
    change(model)
    assert PlainDecoder.of(model) is None
    assert not decoder.is_current()


def test_a_module_replaced_by_its_like_is_found():
    model = tiny("llama")
    decoder = PlainDecoder.of(model)
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 48, bias=False)
    assert not decoder.is_current()
    ours, theirs = both(model)  # one that is made now has it
    assert float((ours - theirs).abs().max()) <= 2e-5 * float(theirs.abs().max())


def test_what_no_name_tells_is_found_by_comparing():
    """Here, a norm whose own number is another than the configuration's."""
    model = tiny("qwen2").train()
    assert PlainDecoder.of(model) is not None
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5
    assert PlainDecoder.of(model) is None
    assert model.training


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3_text"])
def test_other_architectures_are_left_to_transformers(architecture):
    assert PlainDecoder.of(tiny(architecture)) is None
