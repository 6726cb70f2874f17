"""`Usage`: the CPU time and GPUs that processes use, and their machines' energy, to be summed over machines.

Invariant: a process counts once however many workers report it, and a child that has ended counts towards the parent that
waited for it. A process outside the workers' process trees, such as a server started by hand, does not count. Energy is that
of whole processors and GPUs, whoever used them; a counter that the machine lacks or hides is absent, never 0.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True)
class Usage:
    """`cpu_seconds` of each process since its start, including ended children; `gpus` by machine and index; `energy`: the
    joules that each counter shows, and those at which it starts again from 0."""

    cpu_seconds: Mapping[str, float]
    gpus: frozenset[str] = frozenset()
    energy: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.cpu_seconds.values())

    def joules_since(self, before: Usage) -> float | None:
        """Energy used since `before`, of the counters in both; None if there is none."""
        both = [(*self.energy[name], before.energy[name][0]) for name in self.energy.keys() & before.energy.keys()]
        return sum((now - then) % wraps_at for now, wraps_at, then in both) if both else None


def usable_cpus() -> int:
    """The CPUs that this process may use; all of the machine where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        return Usage(cpu_seconds, energy=read_energy())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    number = torch.cuda.current_device() if device.index is None else device.index
    gpu = str(torch.cuda.get_device_properties(number).uuid)
    return Usage(cpu_seconds, frozenset({f"{host}:{visible}:{number}"}), read_energy(gpu))


def read_energy(gpu: str = "", powercap: Path = Path("/sys/class/powercap")) -> dict[str, tuple[float, float]]:
    """Reads the energy counters of the machine's processors and memory (RAPL), and of the GPU with this UUID (NVML).

    Intel's and AMD's processors have RAPL; most systems let only root read it.
    """
    host, found = platform.node(), {}
    for zone in powercap.glob("intel-rapl:*"):
        with suppress(OSError, ValueError):
            if (zone / "name").read_text().startswith(("package", "dram")):  # other zones are parts or sums of these
                microjoules, wraps_at = (
                    int((zone / file).read_text()) for file in ("energy_uj", "max_energy_range_uj")
                )
                found[f"{host}:{zone.name}"] = (microjoules / 1e6, wraps_at / 1e6)
    if gpu:
        with suppress(OSError, AttributeError):  # no driver, or an old one
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
            nvml.nvmlInit_v2()
            if (
                nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu}".encode(), ctypes.byref(handle)) == 0
                and nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) == 0
            ):
                found[f"{host}:{gpu}"] = (millijoules.value / 1e3, math.inf)
    return found


def join_usage(parts: Iterable[Usage]) -> Usage:
    """Merges the usage of several workers, counting each process and each counter once."""
    seconds: dict[str, float] = {}
    gpus: frozenset[str] = frozenset()
    energy: dict[str, tuple[float, float]] = {}
    for part in parts:
        gpus |= part.gpus
        energy |= part.energy
        for process, spent in part.cpu_seconds.items():
            seconds[process] = max(spent, seconds.get(process, 0.0))
    return Usage(seconds, gpus, energy)
