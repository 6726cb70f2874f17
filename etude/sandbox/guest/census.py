"""What all processes of a run hold together: memory and CPU time, read from its own `/proc`.

Invariant: the numbers cover every process of the run and none besides (the PID namespace sees to both); without isolation
they cover the descendants of the supervisor. Memory of files in the box's tmpfs is bounded by its size and not counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


def processes(isolated: bool) -> Iterator[int]:
    """The ids of all processes of the run but this one."""
    me = os.getpid()
    if isolated:
        yield from (pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != me)
    else:
        yield from _descendants(me)


def _descendants(pid: int) -> Iterator[int]:
    for child in _read(f"/proc/{pid}/task/{pid}/children").split():
        yield int(child)
        yield from _descendants(int(child))


def resident_bytes(pids: list[int], limit: int) -> int:
    """Resident bytes of `pids` together. Pages that several share are counted once if the sum would be over `limit`."""
    total = sum(_resident(pid) for pid in pids)
    return total if total <= limit else sum(_proportional(pid) for pid in pids)


def _resident(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if len(fields) > 1 else 0


def _proportional(pid: int) -> int:
    """With shared pages divided among those who share them; in full for a process that has made itself unreadable."""
    text = _read(f"/proc/{pid}/smaps_rollup")
    if not text:
        return _resident(pid)
    total = 0
    for line in text.splitlines():
        if line.startswith(("Pss:", "SwapPss:")):
            total += int(line.split()[1]) * 1024
    return total


def cpu_seconds(pids: list[int]) -> float:
    """CPU seconds of `pids` and of those children they have waited for."""
    total = 0
    for pid in pids:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if len(fields) > 14:
            total += sum(int(field) for field in fields[11:15])
    return total / _TICK


def _read(path: str) -> str:
    """The text of a file of a process that may end meanwhile; then empty."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
