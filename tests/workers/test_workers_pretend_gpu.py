"""Training on the pretend GPU (`pretend_gpu`): nothing mixes its tensors with the CPU's, results are the CPU's, and the host
seldom waits for it."""

import asyncio

import pytest
import torch
from gpu_stage import LIMITS, WAYS, attend_each, learn, options_of, sample
from pretend_gpu import in_a_process

from etude.inference import NativeEngine
from etude.models import load_causal_lm
from etude.models.attention import Scoring
from etude.models.packed import CausalSequences

MICRO_BATCH, STEP, DECODING = 9, 3, 2
"""Waits of the host for the GPU in a micro-batch, in an optimizer step, and in a step of the native engine."""
TOWER = {"qwen2_5_vl": 12, "qwen3_vl": 24}
"""Further waits of Transformers' own vision towers (two layers, three waits each, here) in a micro-batch with pictures."""


def learn_each(gpu, _, paths):
    found = {}
    for name, way in WAYS.items():
        options = options_of(paths[name], **way)
        found[name] = [learn(gpu, options, device, name) for device in ("cpu", "gpu")]
    return found


@pytest.fixture(scope="module")
def ways(model_path, ways_paths):
    return in_a_process(learn_each, model_path, ways_paths)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_every_way_learns_as_on_the_cpu_and_seldom_waits(ways, name):
    (scores, weights, *_), (ours, own, waits, (micros, steps), attention, (places, downloads)) = ways[name]
    half = "half" in name or name == "float16"
    assert torch.allclose(scores, ours, atol=0.05 if half else 1e-5)
    assert weights.keys() == own.keys()
    for key, tensor in weights.items():
        difference = (tensor - own[key]).abs()
        assert difference.mean() < 0.02 if half else difference.max() < 2e-4, key
    offloaded = "offloaded" in name
    crossing = len(weights) * (micros + steps) if offloaded else 0  # gradients, and the weights after a step
    tower = TOWER.get(name.partition(" of ")[2], 0)  # one micro-batch has pictures
    assert sum(waits.values()) <= MICRO_BATCH * micros + STEP * steps + crossing + tower, waits
    assert len(attention) == (2 if half else 0)
    assert places == {"cpu" if offloaded else "gpu"}
    assert downloads >= 2 * micros if offloaded else not downloads  # each layer's input


def sample_each(gpu, path):
    """Tokens on the CPU and on the device, and the waits for 8 tokens a row and for 24."""
    found = [asyncio.run(sample(NativeEngine(load_causal_lm(path)), 24))]
    for tokens in (8, 24):
        engine = NativeEngine(load_causal_lm(path, device="gpu"))
        gpu.reset()
        found += [asyncio.run(sample(engine, tokens)), sum(gpu.waits.values())]
    return found


def test_the_native_engine_samples_as_on_the_cpu_and_seldom_waits(model_path):
    cpu, short, few, gpu, many = in_a_process(sample_each, model_path)
    assert cpu == gpu
    assert [row[:8] for row in cpu] == short
    assert 0 < many - few <= DECODING * 16


# -- attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scoring", [Scoring(0.1), Scoring(0.1, window=4096), Scoring(0.1, chunk=8192)])
def test_attention_keeps_little_for_the_backward_pass(scoring):
    """A response of 30 k tokens after a prompt of 2 k, in a model of 7 B parameters: a mask alone would be 1 GiB."""
    prompt, response, kept = 2048, 30720, {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    query, key, value = (
        torch.empty(heads, prompt + response, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (28, 4, 4)
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        CausalSequences([prompt, response], [(), (0,)]).attend(0, query, key, value, scoring)
    assert sum(each.untyped_storage().nbytes() for each in kept.values()) < 4 * query.untyped_storage().nbytes()


def test_attention_of_rows_that_share_a_prompt_is_the_cpus(model_path):
    """By flash attention in half precision, else by blocks of queries; with windows, chunks and soft caps."""
    found = in_a_process(attend_each, model_path)
    for number, (cpu, gpu) in enumerate(zip(found[::2], found[1::2])):
        bounds = {"atol": 1e-5} if number < len(LIMITS) else {"atol": 0.03, "rtol": 0.02}
        assert all(torch.allclose(a, b, **bounds) for a, b in zip(cpu, gpu)), number
