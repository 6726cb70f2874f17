"""Router replay: where an engine's kernels choose other experts than the trainer's, the trainer repeats their choice."""

import asyncio
import copy

import pytest
import torch

from etude.errors import ConfigError
from etude.inference import NativeEngine, NativeEngineOptions, SamplingParams
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer
from etude.models.experts import routers
from etude.options import OptimOptions
from etude.protocol import DataProto
from etude.training import OptimizerSet, PolicyLearner

TOKENIZER = build_tiny_tokenizer(["1 + 2"], 270)
PROMPTS = ([*range(20)], [*range(20)], [*range(20)], [7, 5, 3], [*range(10), 99, 98])


@pytest.fixture
def model():
    """Experts that differ, behind routers that can hardly tell them apart."""
    spec = TinyModelSpec(
        hidden_size=32,
        intermediate_size=48,
        vocab_size=270,
        max_position_embeddings=256,
        architecture="qwen3_moe",
        initializer_range=0.2,
    )
    made = build_tiny_model(spec, TOKENIZER)
    with torch.no_grad():
        for router in routers(made):
            router.weight.mul_(1e-6)
    return made


def round_otherwise(model, by_token=True):
    """Other kernels: logits that differ in their last digits, and so does the choice between experts that are about equal;
    for each token in another way, or (so that a second pass chooses the same) for all tokens alike."""

    def hook(router, given, output):
        logits, _, _ = output
        noise = torch.linspace(-1e-5, 1e-5, router.num_experts)
        if by_token:
            noise = noise * (given[0].sum(-1, keepdim=True) * 1e4).sin()
        probs = (logits + noise).softmax(-1)
        kept, chosen = probs.topk(router.top_k, dim=-1)
        return logits, kept / kept.sum(-1, keepdim=True), chosen

    for router in routers(model):
        router.register_forward_hook(hook)
    return model


def rolled(model, turns=2, **options):
    """What the engine returned for two turns of each prompt: (context, sampled from, log-probs, experts)."""
    engine = NativeEngine(model, NativeEngineOptions(enable_rollout_routing_replay=True, **options))

    async def talk(number, prompt):
        ids, log_probs, mask = list(prompt), [0.0] * len(prompt), [0] * len(prompt)
        for turn in range(turns):
            params = SamplingParams(max_tokens=9 + number, seed=10 * number + turn)
            out = await engine.generate(f"t{number}", ids, params)
            assert len(out.routed_experts) == len(ids) + len(out.token_ids) - 1
            ids += [*out.token_ids, 11, 12]
            log_probs += [*out.log_probs, 0.0, 0.0]
            mask += [1] * len(out.token_ids) + [0, 0]
        return ids, log_probs, mask, out.routed_experts

    async def main():
        return await asyncio.gather(*(talk(number, prompt) for number, prompt in enumerate(PROMPTS)))

    return asyncio.run(main())


def batch_of(rows, with_experts):
    width = max(len(ids) for ids, *_ in rows) - 1
    pad = torch.nn.utils.rnn.pad_sequence
    columns = {
        "input_ids": pad([torch.tensor(ids) for ids, *_ in rows], batch_first=True),
        "attention_mask": pad([torch.ones(len(ids), dtype=torch.long) for ids, *_ in rows], batch_first=True),
        "response_mask": pad([torch.tensor(mask[1:]) for _, _, mask, _ in rows], batch_first=True),
        "rollout_log_probs": pad([torch.tensor(probs[1:]) for _, probs, *_ in rows], batch_first=True),
    }
    assert columns["response_mask"].shape[1] == width
    return DataProto.from_single_dict(columns | ({"routed_experts": [row[3] for row in rows]} if with_experts else {}))


def gap(model, rows, with_experts, max_tokens=10_000):
    batch = batch_of(rows, with_experts)
    ours = PolicyLearner(model, max_tokens=max_tokens).log_probs(batch, 1.0)[0]
    return float(((ours - batch.batch["rollout_log_probs"]) * batch.batch["response_mask"]).abs().max())


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 2}, {"kv_cache_memory_mb": 1}])
def test_the_trainers_log_probs_are_the_engines_where_its_choice_is_repeated(model, options):
    rows = rolled(round_otherwise(copy.deepcopy(model)), **options)
    assert gap(model, rows, with_experts=True) <= 1e-4
    assert gap(model, rows, with_experts=True, max_tokens=30) <= 1e-4
    assert gap(model, rows, with_experts=False) > 1e-2


def test_gradients_are_those_of_the_engines_network(model):
    """By repeating the choice, packed and with shared prefixes, as by choosing with the engine's kernels, row by row."""
    other = round_otherwise(copy.deepcopy(model), by_token=False)
    rows = rolled(other)
    assert gap(model, rows, with_experts=False) > 1e-2
    gradients = []
    for network, with_experts, checkpointing in ((other, False, False), (model, True, False), (model, True, True)):
        network = copy.deepcopy(network)
        if checkpointing:
            network.activation_checkpointing_enable({"use_reentrant": False})
        optimizer = OptimizerSet(network, OptimOptions(lr=0.0, clip_grad=None), None)
        step, found = optimizer.step, []
        optimizer.step = lambda step=step, found=found, o=optimizer: (
            found.extend(p.grad.clone() if p.grad is not None else None for p in o._parameters),
            step(),
        )[1]
        engine = PolicyLearner(network, max_tokens=60, optimizer=optimizer)
        engine.update(batch_of(rows, with_experts), lambda log_probs, *_: (log_probs.sum(), {}), 1.0)
        gradients.append(dict(zip((n for n, _ in network.named_parameters()), found)))
    theirs, *ours = gradients
    for mine in ours:
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))
        assert any(float(mine[name].abs().max()) > 0 for name in mine if name.endswith("mlp.gate.weight"))


def test_experts_are_recorded_only_where_asked_for(model):
    out = asyncio.run(NativeEngine(model).generate("a", [1, 2, 3], SamplingParams(max_tokens=4)))
    assert out.routed_experts is None
    options = NativeEngineOptions(enable_rollout_routing_replay=True)
    out = asyncio.run(NativeEngine(model, options).generate("a", [1, 2, 3], SamplingParams(max_tokens=4)))
    assert out.routed_experts.array().shape == (6, 3, 2)
    dense = build_tiny_model(TinyModelSpec(hidden_size=32, vocab_size=270), TOKENIZER)
    with pytest.raises(ConfigError, match="'qwen3' has no routers to replay"):
        NativeEngine(dense, options)
