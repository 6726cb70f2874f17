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


@pytest.fixture
def process_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def of_a_new_thread():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


@pytest.mark.parametrize("process_threads", [2], indirect=True)
def test_small_steps_take_one_thread_and_large_ones_all(process_threads) -> None:
    threads = StepThreads(nn.Linear(1000, 1000, bias=False), torch.device("cpu"))
    enough = int(WORTH_THREADS / 2e6)
    seen = []

    def step(number):
        seen.append(number)
        return torch.get_num_threads(), of_a_new_thread()

    found = [threads.submit(tokens, step, tokens).result() for tokens in (1, enough, enough - 1, enough + 1)]
    assert found == [(1, 2), (2, 2), (1, 2), (2, 2)]
    assert seen == [1, enough, enough - 1, enough + 1]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("process_threads", "device"), [(1, "cpu"), (2, "meta")], indirect=["process_threads"], ids=["one", "elsewhere"]
)
def test_where_there_is_nothing_to_choose_steps_run_as_ever(process_threads, device) -> None:
    threads = StepThreads(nn.Linear(1000, 1000), torch.device(device))
    found = {threads.submit(tokens, torch.get_num_threads).result() for tokens in (1, 10**6)}
    assert found == {process_threads}


@pytest.mark.parametrize("process_threads", [2], indirect=True)
def test_an_engine_of_a_small_model_decodes_with_one_thread(process_threads, model, monkeypatch) -> None:
    engine, seen = NativeEngine(model), []
    compute = engine._compute

    def watched(plan):
        seen.append((torch.get_num_threads(), of_a_new_thread()))
        return compute(plan)

    monkeypatch.setattr(engine, "_compute", watched)
    asyncio.run(engine.generate("one", [3, 4, 5], SamplingParams(max_tokens=3, temperature=0.0)))
    assert set(seen) == {(1, 2)}
