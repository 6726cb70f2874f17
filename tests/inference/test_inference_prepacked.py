"""Reordered weights: the same numbers, for as long as the weights are the same, and for the engine alone."""

import asyncio

import pytest
import torch

from etude.inference import NativeEngine, NativeEngineOptions, SamplingParams, prepacked
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer
from etude.models.packable import enable_packing
from tests.inference.test_inference_native import full_log_probs

PROMPT = [3, 1, 4]


@pytest.fixture(params=["qwen3", "qwen2", "gemma2"])
def model(request, monkeypatch):
    """Every layer is reordered, with a bias or without."""
    monkeypatch.setattr(prepacked, "WORTH_REORDERING", 1)
    spec = TinyModelSpec(num_layers=2, vocab_size=270, architecture=request.param, initializer_range=0.1, seed=3)
    made = build_tiny_model(spec, build_tiny_tokenizer(["1 + 2"], 270)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return made


def sampled(engine, seed=1, rows=5):
    async def main():
        names = [f"{seed}/{i}" for i in range(rows)]
        engine.open(names)
        params = (SamplingParams(max_tokens=8, seed=10 * seed + i) for i in range(rows))
        outs = await asyncio.gather(*(engine.generate(n, PROMPT, p) for n, p in zip(names, params)))
        for name in names:
            engine.close(name)
        return outs

    return asyncio.run(main())


def gap(model, outs):
    """Largest difference to the log-probs of full forwards."""
    expected = torch.cat([full_log_probs(model, PROMPT + out.token_ids)[len(PROMPT) - 1 :] for out in outs])
    return float((torch.tensor([p for out in outs for p in out.log_probs]) - expected).abs().max())


def test_log_probs_are_those_of_the_weights_before_and_after_an_update(model):
    engine = NativeEngine(model)
    assert gap(model, sampled(engine)) <= 2e-5
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    asyncio.run(engine.update_weights(None, 1))
    assert gap(model, sampled(engine, seed=2)) <= 2e-5


def test_every_large_layer_is_reordered_once_per_version(model, monkeypatch):
    made = []
    reordered = prepacked._reordered
    monkeypatch.setattr(prepacked, "_reordered", lambda part: made.append(part) or reordered(part))
    engine = NativeEngine(model)
    sampled(engine)
    sampled(engine, seed=2)
    linear = [part for part in model.modules() if type(part) is torch.nn.Linear]
    assert made == linear
    asyncio.run(engine.update_weights(None, 1))
    sampled(engine, seed=3)
    assert made == 2 * linear


def test_the_copy_is_freed_after_a_rollout_that_was_worth_it(model, monkeypatch):
    engine = NativeEngine(model)
    sampled(engine)
    assert engine._prepacked._forwards
    monkeypatch.setattr(prepacked, "_AMORTISED", 100)
    sampled(engine, rows=20)
    assert engine._prepacked._forwards is None


def test_outside_inference_mode_a_step_changes_nothing(model):
    """As the trainer's forward pass in another thread."""
    enable_packing(model)
    used = prepacked.PrepackedLinears(model)
    x = torch.randn(3, model.config.hidden_size)
    layer = model.model.layers[0].mlp.up_proj
    before = layer(x)
    with torch.inference_mode(), used.used(3), torch.inference_mode(False):
        assert torch.equal(layer(x), before)
        assert layer(x).requires_grad
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("shape", [(0,), (1,), (1, 1), (2,), (1, 4), (2, 2), (5,), (1, 70)])
def test_products_of_any_number_of_tokens_are_right(model, shape):
    enable_packing(model)
    for name in ("self_attn.q_proj", "mlp.down_proj"):  # Qwen 2's first one has a bias
        layer = model.model.layers[0].get_submodule(name)
        x = torch.randn(*shape, layer.in_features)
        bias = None if layer.bias is None else layer.bias.double()
        with torch.inference_mode(), prepacked.PrepackedLinears(model).used(3):
            found = layer(x)
            right = torch.nn.functional.linear(x.double(), layer.weight.double(), bias)
            torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=1e-5)


def test_patched_replaced_and_other_layers_are_left_alone(model):
    engine = NativeEngine(model)
    sampled(engine)
    first, second = (layer.mlp for layer in model.model.layers)
    plain = first.up_proj.forward
    first.up_proj.forward = lambda x: 2 * plain(x)
    second.up_proj = torch.nn.Linear(second.up_proj.in_features, second.up_proj.out_features, bias=False)
    model.model.layers[1].register_forward_hook(lambda module, given, out: out * 1.5)
    asyncio.run(engine.update_weights(None, 1))
    assert gap(model, sampled(engine)) <= 2e-5
    assert "forward" in vars(first.up_proj)


def test_another_precision_is_not_reordered(model):
    engine = NativeEngine(model, NativeEngineOptions(dtype="bfloat16"))
    sampled(engine)
    assert engine._prepacked._forwards == {}


def test_a_step_that_fails_leaves_the_model_as_it_was(model):
    used = prepacked.PrepackedLinears(model)
    with pytest.raises(RuntimeError, match="out of memory"), used.used(1):
        raise RuntimeError("out of memory")
    assert all("forward" not in vars(part) for part in model.modules())
