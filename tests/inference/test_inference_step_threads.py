"""How many threads a step computes with."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from etude.inference.native import NativeEngine
from etude.inference.step_threads import WORTH_THREADS, StepThreads
from etude.inference.types import SamplingParams

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_small_steps_take_one_thread_and_large_ones_all() -> None:
    threads = StepThreads(nn.Linear(1000, 1000, bias=False), torch.device("cpu"))
    enough = int(WORTH_THREADS / 2e6)
    with threads.sized(enough - 1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with threads.sized(enough):
        assert torch.get_num_threads() == 2


def test_a_failed_step_gives_the_threads_back() -> None:
    threads = StepThreads(nn.Linear(2, 2), torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), threads.sized(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


def test_another_device_is_left_alone() -> None:
    threads = StepThreads(nn.Linear(2, 2), torch.device("meta"))
    with threads.sized(1):
        assert torch.get_num_threads() == 2


def test_an_engine_of_a_small_model_decodes_with_one_thread(model, monkeypatch) -> None:
    engine, seen = NativeEngine(model), []
    computed = engine._computed

    def watched(plan):
        seen.append(torch.get_num_threads())
        return computed(plan)

    monkeypatch.setattr(engine, "_computed", watched)
    asyncio.run(engine.generate("one", [3, 4, 5], SamplingParams(max_tokens=3, temperature=0.0)))
    assert seen
    assert set(seen) == {1}
    with ThreadPoolExecutor(1) as pool:  # a thread born afterwards finds what the process was given
        assert pool.submit(torch.get_num_threads).result() == 2
