"""The limits of one process of a program; the supervisor enforces those of the whole process tree.

Invariant: once set they are permanent: the hard limits are set with the soft ones.
"""

from __future__ import annotations

import resource
from typing import Any

_MIB = 1 << 20


def impose(bounds: dict[str, Any], address_space: bool, isolated: bool) -> None:
    """Sets this process's limits.

    Without `address_space` its size is not limited: JavaScript engines reserve far more than they use.
    """
    memory = bounds["memory_mb"] * _MIB
    cpu = int(bounds["cpu_seconds"]) + 1
    limits = {
        resource.RLIMIT_AS if address_space else resource.RLIMIT_DATA: (memory, memory),
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_FSIZE: (bounds["file_size_mb"] * _MIB,) * 2,
        resource.RLIMIT_NOFILE: (bounds["open_files"],) * 2,
        # 0 would prevent a core file, but not the program that the host's core_pattern may name.
        resource.RLIMIT_CORE: (1, 1),
        resource.RLIMIT_MEMLOCK: (1 << 16, 1 << 16),
        resource.RLIMIT_MSGQUEUE: (1 << 16, 1 << 16),
        resource.RLIMIT_SIGPENDING: (1024, 1024),
        resource.RLIMIT_RTPRIO: (0, 0),
        resource.RLIMIT_NICE: (0, 0),
        resource.RLIMIT_STACK: (8 * _MIB, resource.getrlimit(resource.RLIMIT_STACK)[1]),
    }
    if isolated:  # counted per user namespace; without one, all processes of the host's user would count
        limits[resource.RLIMIT_NPROC] = (bounds["processes"],) * 2
    for which, (soft, hard) in limits.items():
        ceiling = resource.getrlimit(which)[1]
        if ceiling != resource.RLIM_INFINITY:
            hard = ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling)
        resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
