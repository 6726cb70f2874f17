"""Every architecture the engine claims: against full forwards, against `generate`, and packed against single sequences."""

import asyncio
import copy
import random
from pathlib import Path

import pytest
import torch
from test_inference_native import assert_exact, full_log_probs, largest_error, run_batch

from etude.errors import ConfigError
from etude.inference import NativeEngine, NativeEngineOptions, SamplingParams
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, load_causal_lm
from etude.models.packable import TESTED, enable_packing
from etude.models.packed import CausalSequences, logits_of, packed_hidden
from etude.models.tiny import ARCHITECTURES

TOKENIZER = build_tiny_tokenizer(["1 + 2"], 270)
WINDOWED = ("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
SHAPES = [(name, None) for name in ARCHITECTURES if name != "mistral"] + [(name, 7) for name in WINDOWED]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
CHECKPOINT = Path(__file__).parents[2] / ".." / "shared" / "bench" / "ckpt"
LAYERS = 3


def tiny(architecture, window=None, device="cpu", **sizes):
    sizes = {"num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2, "initializer_range": 0.15, **sizes}
    spec = TinyModelSpec(
        hidden_size=32,
        intermediate_size=48,
        vocab_size=270,
        max_position_embeddings=256,
        architecture=architecture,
        sliding_window=window,
        **sizes,
    )
    return build_tiny_model(spec, TOKENIZER).to(device)


def greedy(engine, prompts, max_tokens):
    async def main():
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        return await asyncio.gather(*(engine.generate(f"p{i}", p, params) for i, p in enumerate(prompts)))

    return [out.token_ids for out in asyncio.run(main())]


def agree_until_tied(model, prompt, ours, theirs):
    """Equal up to the first position whose two best logits are within 1e-4."""
    ids = torch.tensor([prompt + theirs], device=model.device)
    with torch.no_grad():
        best = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().topk(2, dim=-1).values
    tied = (best[:, 0] - best[:, 1] < 1e-4).nonzero()
    length = int(tied[0]) if len(tied) else len(theirs)
    assert ours[:length] == theirs[:length]
    return length


def compared(model, prompts, answers):
    """The number of tokens, 24 an answer at most, that are those of `generate`."""
    count = 0
    for prompt, tokens in zip(prompts, answers):
        ids = torch.tensor([prompt], device=model.device)
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=None
        )
        count += agree_until_tied(model, prompt, tokens, made[0, len(prompt) :].tolist())
    return count


def test_the_factory_builds_what_packing_calls_tested():
    assert set(ARCHITECTURES) == TESTED


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("architecture", "window"), SHAPES)
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 4}])
def test_log_probs_equal_a_float32_full_forward(architecture, window, options, device):
    model = tiny(architecture, window, device)
    assert largest_error(model, run_batch(model, **options)[0]) <= 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("architecture", "window"), SHAPES)
def test_greedy_equals_generate(architecture, window, device):
    """20 prompts an architecture, 220 in all."""
    model = tiny(architecture, window, device)
    rng = random.Random(architecture)
    prompts = [[rng.randrange(265) for _ in range(rng.randint(1, 30))] for _ in range(20)]
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    ours = greedy(NativeEngine(model, NativeEngineOptions(max_num_seqs=8)), prompts, 24)
    assert compared(reference, prompts, ours) > 20 * 20


@pytest.mark.skipif(not CHECKPOINT.is_dir(), reason="needs the shared checkpoint")
def test_greedy_equals_generate_on_a_trained_model():
    model = load_causal_lm(str(CHECKPOINT))
    rng = random.Random(0)
    prompts = [[rng.randrange(2039) for _ in range(rng.randint(4, 24))] for _ in range(30)]
    prompts = [prompt[: 4 + i % 3] + prompt for i, prompt in enumerate(prompts)]
    prompts += [list(prompt) for prompt in prompts[:10]]  # prompts that come twice share one prefill
    reference = copy.deepcopy(model)
    assert compared(reference, prompts, greedy(NativeEngine(model), prompts, 24)) > 40 * 20


@pytest.mark.parametrize(("architecture", "window"), SHAPES)
def test_packed_sequences_get_the_gradients_of_single_ones(architecture, window):
    """A tree of runs through the packed attention, against the model's own eager forward of each sequence."""
    model = tiny(architecture, window)
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("eager")
    enable_packing(model)
    ids = torch.arange(26) * 37 % 265
    layout = CausalSequences([9, 5, 4, 8], [[], [0], [0, 1], []])
    sequences = [[*range(18)], [*range(18, 26)]]
    packed = logits_of(model, packed_hidden(model, ids, layout.position_ids(), layout))
    single = torch.cat([alone(input_ids=ids[row][None], use_cache=False).logits[0] for row in sequences])
    torch.testing.assert_close(packed, single, atol=2e-5, rtol=1e-5)
    for logits in (packed, single):
        logits.log_softmax(-1)[:, 7].sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("architecture", "window"), [("qwen3", None), ("qwen3", 7), ("gemma2", 40)])
@pytest.mark.parametrize("limit", ["_TILE", "_BIAS_ELEMENTS"])
def test_a_long_prompt_attends_in_tiles(architecture, window, limit, monkeypatch):
    monkeypatch.setattr(f"etude.inference.layout.{limit}", 4 if limit == "_TILE" else 1000)
    model = tiny(architecture, window)
    prompt = [k * 7 % 265 for k in range(100)]
    out = asyncio.run(NativeEngine(model).generate("a", prompt, SamplingParams(max_tokens=5)))
    assert_exact(model, prompt, out)


@pytest.mark.parametrize("sizes", [{"num_kv_heads": 1}, {"num_kv_heads": 4}, {"tie_word_embeddings": False}])
def test_grouping_and_untied_embeddings(sizes):
    model = tiny("llama", **sizes)
    assert largest_error(model, run_batch(model)[0]) <= 1e-5


# What a log-prob may be off by against a float32 full forward of the same (rounded) weights; measured: see docs/engines.md.
BOUNDS = {"float32": 1e-5, "bfloat16": 0.15, "float16": 0.03}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_error_of_each_precision(dtype, device):
    model = tiny("qwen3", device=device).to(getattr(torch, dtype))
    reference = copy.deepcopy(model).float()
    assert largest_error(reference, run_batch(model)[0]) <= BOUNDS[dtype]


@pytest.mark.parametrize(("given", "dtype", "least"), [("bf16", "bfloat16", 1e-5), ("float16", "float16", 1e-6)])
def test_dtype_samples_in_another_precision_and_follows_the_trainers_weights(given, dtype, least):
    model = tiny("qwen3")
    engine = NativeEngine(model, NativeEngineOptions(dtype=given))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert engine._scheduler.cache.shape.dtype == getattr(torch, dtype)

    def error():
        out = asyncio.run(engine.generate(f"v{engine._version}", [1, 2, 3], SamplingParams(max_tokens=30)))
        return float((full_log_probs(model, [1, 2, 3, *out.token_ids])[2:] - torch.tensor(out.log_probs)).abs().max())

    assert least < error() < BOUNDS[dtype]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    asyncio.run(engine.update_weights(None, 1))
    assert error() < BOUNDS[dtype]
    with pytest.raises(ConfigError, match="did you mean 'float32'"):
        NativeEngine(model, NativeEngineOptions(dtype="float23"))


def refused(config, match):
    from transformers import AutoModelForCausalLM

    with pytest.raises(ConfigError, match=match) as error:
        NativeEngine(AutoModelForCausalLM.from_config(config))
    assert config.model_type in str(error.value)
    assert "\n" not in str(error.value)


SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def test_what_is_refused():
    import transformers as t

    refused(t.DiffLlamaConfig(**{**SIZES, "num_key_value_heads": 2}), "attends more than once.*name=vllm")
    window = {"attention_window_size": 4, "lru_width": 16}
    refused(t.RecurrentGemmaConfig(**SIZES, **window), "its cache fails.*name=vllm")


def test_an_architecture_nobody_tested_is_compared_before_it_is_used(monkeypatch):
    import transformers as t

    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    window = {"sliding_window": 3}
    for config, more in ((t.Olmo2Config, {}), (t.GraniteConfig, {}), (t.CohereConfig, {}), (t.Cohere2Config, window)):
        model = t.AutoModelForCausalLM.from_config(
            config(**sizes, **more, initializer_range=0.2, pad_token_id=0)
        ).eval()
        engine = NativeEngine(model)
        for i in range(3):
            prompt = [7 * i + 3, 5, 11, 2 + i]
            out = asyncio.run(engine.generate(f"r{i}", prompt, SamplingParams(max_tokens=20, seed=i)))
            assert_exact(model, prompt, out, atol=1e-4)
    # A model whose tokens reach each other on another way: here, through what a forward hook adds up over the row.
    model = t.AutoModelForCausalLM.from_config(t.Olmo2Config(**sizes, pad_token_id=0))
    model.model.layers[0].register_forward_hook(lambda module, given, out: out + out.cumsum(dim=1))
    with pytest.raises(ConfigError, match="with its own cache, later tokens get other"):
        NativeEngine(model)
    # One that is right as long as it is fed whole sequences.
    model = t.AutoModelForCausalLM.from_config(t.Olmo2Config(**sizes, pad_token_id=0))
    model.model.layers[0].register_forward_hook(lambda module, given, out: out * 2 if out.shape[1] == 1 else out)
    with pytest.raises(ConfigError, match="packed: its kept keys and values give later tokens other logits"):
        NativeEngine(model)
    assert model.training


def test_a_namesake_of_a_tested_architecture_is_compared_too():
    """A checkpoint's own code may say it is a Llama, and let tokens reach each other in another way."""
    import transformers as t

    class LlamaForCausalLM(t.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.layers[0].mlp.down_proj = Mixing(self.model.layers[0].mlp.down_proj)

    class Mixing(torch.nn.Module):
        def __init__(self, plain):
            super().__init__()
            self.plain = plain

        def forward(self, x):
            return self.plain(x.cumsum(dim=-2))

    with pytest.raises(ConfigError, match="'llama' cannot run packed: packed sequences get other"):
        enable_packing(LlamaForCausalLM(t.LlamaConfig(**SIZES, initializer_range=0.2)))


def test_caches_of_models_that_cannot_run_packed_go_with_the_weights():
    import transformers as t

    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "pad_token_id": 0}
    model = t.AutoModelForCausalLM.from_config(t.MambaConfig(**sizes, initializer_range=0.3)).eval()
    engine, context = NativeEngine(model), [5, 6, 7, 8]
    for version in range(3):
        out = asyncio.run(engine.generate("a", context, SamplingParams(max_tokens=6, seed=version)))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([context + out.token_ids]), use_cache=False).logits[0]
        expected = logits.log_softmax(-1)[len(context) - 1 : -1].gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
        assert torch.allclose(expected, torch.tensor(out.log_probs), atol=1e-5)
        context = [*context, *out.token_ids, 9]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        asyncio.run(engine.update_weights(None, version + 1))
