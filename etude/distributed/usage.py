"""`Usage`: the CPU time and GPUs that processes use, so that a run's total can be summed over machines.

Invariant: a process counts once however many workers report it, and a child that has ended counts towards the parent that
waited for it. A process outside the workers' process trees, such as a server started by hand, does not count.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True)
class Usage:
    """`cpu_seconds` of each process since its start, including ended children; `gpus` by machine and index."""

    cpu_seconds: Mapping[str, float]
    gpus: frozenset[str] = frozenset()

    @property
    def total(self) -> float:
        return sum(self.cpu_seconds.values())


def measure_usage(device: torch.device | None = None) -> Usage:
    """Measures this process and its descendants, and the GPU `device`."""
    me, host = psutil.Process(), platform.node()
    cpu_seconds = {}
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):  # it has ended in the meantime
            spent = process.cpu_times()
            ended = getattr(spent, "children_user", 0.0) + getattr(spent, "children_system", 0.0)
            cpu_seconds[f"{host}:{process.pid}:{process.create_time()}"] = spent.user + spent.system + ended
    if device is None or device.type != "cuda":
        return Usage(cpu_seconds)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    number = torch.cuda.current_device() if device.index is None else device.index
    return Usage(cpu_seconds, frozenset({f"{host}:{visible}:{number}"}))


def join_usage(parts: Iterable[Usage]) -> Usage:
    """Merges the usage of several workers, counting each process once."""
    seconds: dict[str, float] = {}
    gpus: frozenset[str] = frozenset()
    for part in parts:
        gpus |= part.gpus
        for process, spent in part.cpu_seconds.items():
            seconds[process] = max(spent, seconds.get(process, 0.0))
    return Usage(seconds, gpus)
