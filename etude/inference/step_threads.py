"""How many threads a step of the native engine uses.

A decode step of a small model runs some hundred operators of microseconds each, and synchronising threads after each costs
more than they save: with two threads a step of 0.1 GFLOP takes twice as long as with one, a step of 2 GFLOP as long, and
one of 10 GFLOP three quarters of the time (`docs/engines.md` has the table). So small steps run on one thread.

Invariant: a step's thread count depends only on its size. The threshold is a constant, not a measured time: if matrix
products round differently by thread count, a repeated run still gives the same results. There are two engine threads, one
of them permanently single-threaded, so the thread count of the process and of its other threads stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

R = TypeVar("R")

WORTH_THREADS = 2e9
"""Floating-point operations from which on a step uses all threads of the process."""


class StepThreads:
    """Runs the steps of one model, submitted by the caller one at a time."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._shared = self._alone = ThreadPoolExecutor(max_workers=1, thread_name_prefix="etude-engine")
        self._token_flops = 2 * sum(parameter.numel() for parameter in model.parameters())
        threads = torch.get_num_threads()
        if device.type == "cpu" and threads > 1:
            self._alone = ThreadPoolExecutor(max_workers=1, thread_name_prefix="etude-engine-small")
            self._alone.submit(_compute_alone).result()
            torch.set_num_threads(threads)  # `_compute_alone` has also changed the default for new threads

    def submit(self, tokens: int, step: Callable[..., R], *arguments: Any) -> Future[R]:
        small = tokens * self._token_flops < WORTH_THREADS
        return (self._alone if small else self._shared).submit(step, *arguments)


def _compute_alone() -> None:
    """Makes this thread permanently single-threaded."""
    torch.set_num_threads(1)
    torch.get_num_threads()  # a thread adopts the process's setting on its first query: make that now
