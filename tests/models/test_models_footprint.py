"""The estimate of activations, which allocates nothing, is what autograd keeps of the real model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, load_causal_lm, save_pretrained
from etude.models.checkpointing import checkpoint_layers
from etude.models.footprint import activation_bytes
from etude.models.packable import enable_packing
from etude.models.packed import CausalSequences, packed_hidden
from etude.options import ModelOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu
import scaling
from memory import Shape, compare

TOKENS = 96


def write(folder, architecture):
    tokenizer = build_tiny_tokenizer(["one two three"], 280)
    spec = TinyModelSpec(hidden_size=64, num_layers=5, intermediate_size=96, architecture=architecture)
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, folder)
    return folder


def kept_bytes(model):
    """Bytes a token that a real forward pass keeps for the backward pass."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    layout = CausalSequences([TOKENS // 2, TOKENS // 2])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed_hidden(model, torch.arange(TOKENS), layout.position_ids(), layout)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(t.untyped_storage().nbytes() for place, t in storages.items() if place not in weights) / TOKENS


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_the_estimate_is_what_autograd_keeps(tmp_path, architecture, checkpointing):
    folder = write(tmp_path, architecture)
    model = load_causal_lm(folder).train()
    enable_packing(model)
    if checkpointing:
        checkpoint_layers(model)
    options = ModelOptions(path=str(folder))
    found = activation_bytes(options, torch.float32, checkpointing=checkpointing)
    assert found.kept == pytest.approx(kept_bytes(model), rel=0.1)
    layer = found.working / 2  # on a CPU
    assert layer > found.kept / 5 if checkpointing else layer < found.kept / 4
    half = activation_bytes(options, torch.bfloat16, checkpointing=checkpointing)
    assert half.kept < 0.8 * found.kept


def test_what_cannot_be_told_is_none(tmp_path):
    options = ModelOptions(path=str(write(tmp_path, "qwen3_moe")))
    assert activation_bytes(options, torch.float32, checkpointing=False) is None


def test_an_update_takes_the_memory_that_is_estimated():
    """Within 30 %, in a process of its own; `benchmarks/memory.py` has larger shapes."""
    expected, found, _ = compare(Shape("small", 256, 4, 1024, 8192, rows=8, length=256))
    assert 0.7 < expected / found < 1.3


MEASURED = {
    "short": 28.8,
    "checkpointing": 11.5,
    "long": 10.6,
    "larger": 66.7,
    "larger-lora": 32.1,
}
"""GiB that PyTorch allocated at most on an H100 (docs/performance.md)."""


@pytest.mark.parametrize("name", MEASURED)
def test_an_update_on_an_h100_took_what_is_estimated(tmp_path, name):
    """Within 8 %; LoRA, whose estimate is higher than that for a reason not found, within 30 %."""
    case = gpu.CASES[name]
    found = gpu.estimate(case, tmp_path) / gpu.GIB
    assert 0.97 < found / MEASURED[name] < (1.3 if case.lora else 1.08), found


def test_the_rows_of_scaling_on_paper_are_those_computed():
    page = (Path(__file__).parents[2] / "docs/scaling.md").read_text()
    head, _, *rows = scaling.table(["0.5 B"])
    assert head in page
    assert [row for row in rows if row not in page] == []
    assert len(rows) == 6


HOLES = """
import sys, psutil, torch
from etude.models import load_causal_lm
from etude.models.checkpointing import checkpoint_layers
if sys.argv[2] == "checkpointing":
    checkpoint_layers(load_causal_lm(sys.argv[1]))
first = torch.ones(7 << 20)
del first  # from now on glibc would keep blocks of up to 28 MiB
blocks = [torch.ones(2 << 20) for _ in range(40)]
full = psutil.Process().memory_info().rss
del blocks[::2]
print(full - psutil.Process().memory_info().rss)
"""


def test_with_checkpointing_freed_blocks_go_back_to_the_system(tmp_path):
    folder = str(write(tmp_path, "llama"))
    plain, checkpointing = (
        int(subprocess.run([sys.executable, "-c", HOLES, folder, how], capture_output=True, check=True).stdout)
        for how in ("plain", "checkpointing")
    )
    assert plain < 50 << 20 < 150 << 20 < checkpointing
