"""`etude doctor --gpu`: every check runs on the CPU and on the pretend GPU, and notices what is wrong."""

import sys
from importlib.util import find_spec

import pytest
import sglang_server
import torch
from pretend_gpu import in_a_process

from etude.checks import gpu
from etude.checks.findings import Findings, Level
from etude.inference import ENGINES, NativeEngine
from etude.models import load_causal_lm

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
    "sglang",
]


class Loads:
    """In place of vLLM: an engine that loads folders, here with the native engine's sampling."""

    shares_weights = False
    served = None
    stale = False

    @classmethod
    def from_setup(cls, setup):
        made = cls()
        made.engine, made.calls = NativeEngine(load_causal_lm(setup.model_path)), []
        cls.served = made
        return made

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def update_weights(self, folder, version):
        self.calls.append(load_causal_lm(folder).config.model_type)
        if not self.stale:
            self.engine = NativeEngine(load_causal_lm(folder))
        self.engine._version = version

    async def sleep(self):
        self.calls.append("sleep")

    async def wake(self, *parts):
        self.calls.append(("wake", *parts))


def try_engine(monkeypatch, tmp_path, check, stale=False):
    """(level, message) of what a check finds on the CPU where the packages are installed."""
    monkeypatch.setattr(gpu, "find_spec", lambda name: name in ("vllm", "sglang") or find_spec(name))
    monkeypatch.setitem(ENGINES._items, "vllm", Loads)
    monkeypatch.setattr(Loads, "stale", stale)
    monkeypatch.setattr(gpu, "_SGLANG", (sys.executable, sglang_server.__file__, "{model}", "0", "{port}", "Network"))
    found = Findings().run_stage("gpu", gpu.Trial("cpu", tmp_path, gpu.SMALL), only=(check,), fix="report it")
    return [(each.level, each.message) for each in found.all]


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


def test_numbers_that_differ_and_a_sync_that_nobody_misses_are_errors(tmp_path, monkeypatch):
    trial = gpu.Trial("cpu", tmp_path, gpu.SMALL)
    monkeypatch.setattr(gpu, "_BOUNDS", {torch.bfloat16: (1e-9, 1e-9)})
    monkeypatch.setattr(gpu, "_move", lambda worker: None)  # the probe has nothing to see
    for check in (gpu._numbers, gpu._weight_sync):
        assert Level.ERROR in [each.level for each in check(trial) if not isinstance(each, str)]


def test_vllm_gets_a_model_and_a_mixture_by_folder_through_a_sleep(monkeypatch, tmp_path):
    found = try_engine(monkeypatch, tmp_path, "vllm")
    assert [level for level, _ in found] == [Level.OK] * 2
    assert [message.partition(":")[0] for _, message in found] == ["vllm by folder", "vllm by folder, a mixture"]
    assert all("an update that is withheld is noticed" in message for _, message in found)
    assert Loads.served.calls == ["qwen3_moe", "sleep", ("wake", "weights"), "qwen3_moe", ("wake", "kv_cache")]


def test_an_engine_that_takes_a_folder_and_keeps_its_weights_is_an_error(monkeypatch, tmp_path):
    found = try_engine(monkeypatch, tmp_path, "vllm", stale=True)
    assert [level for level, _ in found] == [Level.ERROR] * 2
    assert all("does not serve version 1" in message for _, message in found)


@pytest.mark.slow
def test_sglang_is_started_and_gets_a_model_by_folder_through_a_sleep(monkeypatch, tmp_path):
    [(level, message)] = try_engine(monkeypatch, tmp_path, "sglang")
    assert (level, message.partition(":")[0]) == (Level.OK, "sglang by folder")
    assert "an update that is withheld is noticed" in message
