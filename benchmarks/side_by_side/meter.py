"""CPU seconds, wall seconds and memory of this process.

Invariant: needs only the standard library, so that every contender is measured by the same code, in whatever environment
it runs. CPU seconds are user and system time of all threads, and of child processes that have ended.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any


class Meter:
    """Counts seconds since construction."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), cpu_seconds()

    def read(self) -> dict[str, float]:
        """Returns `wall` and `cpu`, in seconds."""
        return {"wall": time.perf_counter() - self._wall, "cpu": cpu_seconds() - self._cpu}


def cpu_seconds() -> float:
    """Returns the user and system seconds of this process and of its children that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def resident_mib() -> float:
    """Returns the current resident memory, in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def peak_mib() -> float:
    """Returns the peak resident memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(work: Callable[[], object], repetitions: int) -> dict[str, float]:
    """Returns medians of `wall` and `cpu` seconds over `repetitions`, after a warm-up run that is not counted."""
    work()
    readings = []
    for _ in range(repetitions):
        meter = Meter()
        kept = work()
        readings.append(meter.read())
        del kept
    return {name: statistics.median(r[name] for r in readings) for name in ("wall", "cpu")}


def report(figures: dict[str, Any]) -> None:
    """Prints the driver's result as its last line."""
    print(json.dumps(figures), flush=True)
