"""The total memory and CPU time of a run's processes, read from its own `/proc`.

Invariant: the numbers cover exactly the processes and sockets of the run (its PID and network namespaces ensure
both); without isolation they cover the descendants of the supervisor, and no sockets. What cannot be measured counts with
its maximum: a socket's buffers count as full. Files in the box's tmpfs are bounded by its size and not counted;
`docs/sandbox.md` lists what else is not.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

_TICK = os.sysconf("SC_CLK_TCK")
_MEMORY = ("VmRSS", "VmSwap", "VmPTE", "HugetlbPages")
"""The memory fields of `/proc/PID/status`: resident, swapped out, page tables, and huge pages."""


def processes(isolated: bool) -> Iterator[int]:
    """The ids of all processes of the run but this one."""
    me = os.getpid()
    if isolated:
        yield from (pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != me)
    else:
        yield from _descendants(me)


def _descendants(pid: int) -> Iterator[int]:
    for task in _tasks(pid):  # a child belongs to a thread
        for child in _read(f"{task}/children").split():
            yield int(child)
            yield from _descendants(int(child))


def memory_bytes(pids: list[int], limit: int) -> int:
    """Total bytes of `pids`. Shared pages are counted once if the sum would exceed `limit`."""
    total = sum(_held(pid) for pid in pids)
    return total if total <= limit else sum(_proportional(pid) for pid in pids)


def _held(pid: int) -> int:
    if held := _fields(f"/proc/{pid}/status", _MEMORY):
        return held
    # A process whose first thread has ended looks like a zombie, which has no memory; its other threads still do.
    return max((_fields(f"{task}/status", _MEMORY) for task in _tasks(pid)), default=0)


def _proportional(pid: int) -> int:
    """With shared pages divided among their sharers; in full for a process that made itself unreadable."""
    for folder in (f"/proc/{pid}", *_tasks(pid)):
        if shared := _fields(f"{folder}/smaps_rollup", ("Pss", "SwapPss")):
            return shared + _fields(f"{folder}/status", ("VmPTE", "HugetlbPages"))
    return _held(pid)


def _tasks(pid: int) -> list[str]:
    folder = f"/proc/{pid}/task"
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:
        return []


def _fields(path: str, names: tuple[str, ...]) -> int:
    """Bytes in these fields of a file whose lines are a name and KiB."""
    fields = (line.split() for line in _read(path).splitlines())
    return 1024 * sum(int(field[1]) for field in fields if field and field[0].rstrip(":") in names)


def socket_bytes() -> int:
    """The maximum that the sockets of this network namespace can hold.

    Includes sockets without a process: in transit in a message, not accepted yet, or closed with unread data. As their
    contents are hard to find, all count as full.
    """
    for line in _read("/proc/self/net/sockstat").splitlines():
        if line.startswith("sockets: used"):
            return int(line.split()[2]) * _SOCKET
    return 0


def _largest_socket() -> int:
    """A socket sends while its buffer has room, so its last message may be as large as all before it."""
    with socket.socket(socket.AF_UNIX) as one:
        sizes = [one.getsockopt(socket.SOL_SOCKET, option) for option in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
    return 2 * max(sizes)


_SOCKET = _largest_socket()


def cpu_seconds(pids: list[int]) -> float:
    """CPU seconds of `pids` and of the children they have waited for."""
    total = 0
    for pid in pids:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if len(fields) > 14:
            total += sum(int(field) for field in fields[11:15])
    return total / _TICK


def _read(path: str) -> str:
    """The text of a process's file; empty if it ended meanwhile."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
