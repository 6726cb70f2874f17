"""How many threads a step of the native engine computes with.

A decode step of a small model is some hundred operators of microseconds each, and threads that meet after every one of
them cost more than they compute: with two threads a step of 0.1 GFLOP takes twice as long as with one, one of 2 GFLOP as
long, one of 10 GFLOP three quarters of it (`docs/engines.md` has the table). So small steps run on one thread.
The bound is a number, not a clock: where matrix products round differently by the number of threads, a run that is
repeated still computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORTH_THREADS = 2e9
"""Floating-point operations from which on a step is shared out among the threads of the process."""


class StepThreads:
    """The rule for one model."""

    def __init__(self, model: Any, device: torch.device) -> None:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self._token_flops = 2 * parameters if device.type == "cpu" else None

    @contextmanager
    def sized(self, tokens: int) -> Iterator[None]:
        """Inside, this thread computes with as many threads as a step of `tokens` tokens is worth."""
        all_threads = torch.get_num_threads()
        if self._token_flops is None or all_threads == 1 or tokens * self._token_flops >= WORTH_THREADS:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(all_threads)
