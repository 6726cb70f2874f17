"""What runs only where there is a GPU of CUDA: training in every way, and attention, are the CPU's."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from gpu_stage import LIMITS, WAYS, attend_each, learn, options_of

from etude.models.packed import CausalSequences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
NOTHING_COUNTED = SimpleNamespace(reset=lambda: None, waits=Counter(), calls=[])


@pytest.mark.parametrize("name", WAYS)
def test_every_way_learns_as_on_the_cpu(model_path, name):
    role, options = "critic" if "critic" in name else "actor", options_of(model_path, **WAYS[name])
    (scores, weights, *_), (ours, own, *_) = (
        learn(NOTHING_COUNTED, options, device, role) for device in ("cpu", "cuda")
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
