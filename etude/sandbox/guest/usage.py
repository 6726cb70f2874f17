"""Measures the total memory and CPU time of a run's processes, from its own `/proc`.

Invariant: the numbers cover exactly the processes and sockets of the run, thanks to its PID and network namespaces; without
isolation they cover the supervisor's descendants, and no sockets. What cannot be measured counts as its maximum: a socket's
buffers count as full. Files in the run's tmpfs are limited by its size and not counted; `docs/sandbox.md` lists what else
is not.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

_TICK = os.sysconf("SC_CLK_TCK")
_MEMORY = ("VmRSS", "VmSwap", "VmPTE", "HugetlbPages")
"""The memory fields of `/proc/PID/status`: resident, swapped out, page tables, and huge pages."""


def processes(isolated: bool) -> Iterator[int]:
    """Yields the PIDs of all processes of the run except this one."""
    me = os.getpid()
    if isolated:
        yield from (pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != me)
    else:
        yield from _descendants(me)


def _descendants(pid: int) -> Iterator[int]:
    for task in _tasks(pid):  # children are listed per thread
        for child in _read(f"{task}/children").split():
            yield int(child)
            yield from _descendants(int(child))


def memory_bytes(pids: list[int], limit: int) -> int:
    """Returns the memory of `pids` in bytes. Shared pages are counted only once if the sum would exceed `limit`."""
    total = sum(_full_bytes(pid) for pid in pids)
    return total if total <= limit else sum(_proportional_bytes(pid) for pid in pids)


def _full_bytes(pid: int) -> int:
    if held := _fields(f"/proc/{pid}/status", _MEMORY):
        return held
    # A process whose first thread has ended looks like a zombie without memory; its other threads show the memory.
    return max((_fields(f"{task}/status", _MEMORY) for task in _tasks(pid)), default=0)


def _proportional_bytes(pid: int) -> int:
    """Returns a process's memory with shared pages divided among the processes that share them, or in full if the process
    made itself unreadable."""
    for folder in (f"/proc/{pid}", *_tasks(pid)):
        if shared := _fields(f"{folder}/smaps_rollup", ("Pss", "SwapPss")):
            return shared + _fields(f"{folder}/status", ("VmPTE", "HugetlbPages"))
    return _full_bytes(pid)


def _tasks(pid: int) -> list[str]:
    folder = f"/proc/{pid}/task"
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:
        return []


def _fields(path: str, names: tuple[str, ...]) -> int:
    """Returns the sum in bytes of these fields of a file whose lines are `name: KiB`."""
    fields = (line.split() for line in _read(path).splitlines())
    return 1024 * sum(int(field[1]) for field in fields if field and field[0].rstrip(":") in names)


def socket_bytes() -> int:
    """Returns the maximum bytes that the sockets of this network namespace can hold.

    Includes sockets that no process has open: in transit in a message, not yet accepted, or closed with unread data. Since
    their contents are hard to measure, all sockets count as full.
    """
    for line in _read("/proc/self/net/sockstat").splitlines():
        if line.startswith("sockets: used"):
            return int(line.split()[2]) * _SOCKET
    return 0


def _largest_socket() -> int:
    """Returns the maximum bytes in a socket: it sends while its buffer has room, so its last message may be as large as
    all before it together."""
    with socket.socket(socket.AF_UNIX) as one:
        sizes = [one.getsockopt(socket.SOL_SOCKET, option) for option in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
    return 2 * max(sizes)


_SOCKET = _largest_socket()


def cpu_seconds(pids: list[int]) -> float:
    """Returns the CPU seconds of `pids` and of the children that they have waited for."""
    total = 0
    for pid in pids:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if len(fields) > 14:
            total += sum(int(field) for field in fields[11:15])
    return total / _TICK


def _read(path: str) -> str:
    """Returns the text of a file in `/proc`; empty if the process has ended meanwhile."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
