"""Seconds by activity of one step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Timings:
    """Wall seconds by name in `seconds`; CPU seconds of the process, all threads, in `cpu()`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._cpu = time.process_time()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def cpu(self) -> float:
        """CPU seconds since construction."""
        return time.process_time() - self._cpu

    def of_work(self) -> dict[str, float]:
        """`seconds` without activities that had nothing to do."""
        return {name: seconds for name, seconds in self.seconds.items() if seconds >= 1e-4}
