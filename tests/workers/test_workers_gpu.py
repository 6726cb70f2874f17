"""What runs only where there is a GPU of CUDA: training in every way, and attention, are the CPU's."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from gpu_stage import LIMITS, WAYS, attend_each, learn, options_of, sample

from etude.inference import NativeEngine
from etude.models import load_causal_lm
from etude.models.attention import Scoring, partial_attention, visibility
from etude.models.packed import CausalSequences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
NOTHING_COUNTED = SimpleNamespace(reset=lambda: None, waits=Counter(), downloads=Counter(), calls=[])


@pytest.mark.parametrize("name", WAYS)
def test_every_way_learns_as_on_the_cpu(ways_paths, name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the convolution of patches of pictures
    options = options_of(ways_paths[name], **WAYS[name])
    (scores, weights, *_), (ours, own, *_) = (
        learn(NOTHING_COUNTED, options, device, name) for device in ("cpu", "cuda")
    )
    half = "half" in name or name == "float16"
    assert torch.allclose(scores, ours, atol=0.05 if half else 1e-4)
    assert weights.keys() == own.keys()
    for key, tensor in weights.items():
        difference = (tensor - own[key]).abs()
        assert difference.mean() < 0.02 if half else difference.max() < 2e-3, key


@pytest.mark.parametrize("width", [8, 64, 128, 256])
@pytest.mark.parametrize("lengths", [(5, 3, 4, 6), (300, 70, 200, 129)])
def test_attention_of_rows_that_share_a_prompt_is_the_cpus(model_path, width, lengths):
    runs = CausalSequences(list(lengths), [(), (0,), (0, 1), ()])
    found = attend_each(None, model_path, "cuda", width, runs)
    for number, (cpu, gpu) in enumerate(zip(found[::2], found[1::2])):
        bound = 1e-4 if number < len(LIMITS) else 2e-2
        for ours, own in zip(cpu, gpu):
            assert (ours - own).norm() <= bound * ours.norm(), (number, float((ours - own).norm() / ours.norm()))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("keys", "queries"), [(512, 4), (509, 4), (1001, 32)])
def test_attention_over_a_part_is_that_of_float64(dtype, bound, keys, queries):
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 2, n, 64, dtype=dtype, device="cuda") for n in (queries, keys, keys))
    mask = (torch.rand(3, 1, queries, keys, device="cuda") > 0.3).index_fill_(-1, torch.tensor(0, device="cuda"), True)
    with torch.no_grad():
        found = partial_attention(query, key, value, visibility(mask, dtype), Scoring(0.125))
        exact = partial_attention(
            query.double(), key.double(), value.double(), visibility(mask, torch.float64), Scoring(0.125)
        )
    for ours, own in zip(found, exact):
        assert (ours.double() - own).norm() <= bound * own.norm()


def test_the_native_engine_samples_what_it_samples_on_the_cpu(model_path):
    cpu, gpu = (
        asyncio.run(sample(NativeEngine(load_causal_lm(model_path, device=device)), 20)) for device in ("cpu", "cuda")
    )
    assert cpu == gpu
