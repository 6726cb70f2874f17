"""`etude doctor --gpu`: every check runs on the CPU and on the pretend GPU, and notices what is wrong."""

import pytest
import torch
from pretend_gpu import in_a_process

from etude.checks import gpu
from etude.checks.findings import Level

SUBJECTS = [
    "device",
    "attention",
    "numbers",
    "training",
    "engine",
    "checkpoint",
    "communication",
    "ranks",
    "weight sync",
    "vllm",
]


@pytest.mark.slow
def test_every_check_runs_on_the_cpu():
    found = gpu.inspect_gpu("cpu", ranks=2)
    assert [(each.subject, each.level) for each in found.all] == [(subject, Level.OK) for subject in SUBJECTS]
    assert "fsdp2: loss and gradient within" in found.all[SUBJECTS.index("ranks")].message
    assert not torch.are_deterministic_algorithms_enabled()


def inspect(pretend, path):
    gpu._UPDATES = 2
    return [(each.subject, each.level, each.message) for each in gpu.inspect_gpu("gpu", gpu.SMALL).all]


@pytest.mark.slow
def test_every_check_runs_on_a_gpu(tmp_path):
    found = in_a_process(inspect, gpu.Trial("cpu", tmp_path, gpu.SMALL).path)
    assert [(subject, level) for subject, level, _ in found] == [(subject, Level.OK) for subject in SUBJECTS], found
    assert "varlen" in found[1][2]
