"""The namespaces of one run: its own mounts, network, host name and `/proc`, initially empty and discarded after the run.

Invariant: after `enter_namespaces` everything that the run can write is in one size-limited tmpfs that no other run ever
sees, and its network is not connected to anything. Without isolation there is only a folder, without guarantees.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import tempfile
import time
from dataclasses import dataclass

from . import kernel
from .settings import FILES, SHM, TMP, WORK, Settings

_INODES = 20_000
_TCP_BUFFER = 106_496  # bytes; half of Linux's default for other sockets
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


@dataclass(frozen=True)
class Folders:
    """The folders of a run."""

    work: str
    tmp: str
    folder: str
    """The folder to remove at the end; empty if the kernel does it."""

    def close(self) -> None:
        """Removes the folder of a run without isolation."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def enter_namespaces(settings: Settings, disk_mb: int, memory_mb: int) -> Folders:
    """Creates the namespaces, with `disk_mb` MiB for files and a `/proc` that shows `memory_mb` MiB of memory; without
    isolation there are only the folders."""
    if not settings.isolated:
        folder = tempfile.mkdtemp(prefix="run-", dir=settings.scratch)
        work, tmp = os.path.join(folder, "work"), os.path.join(folder, "tmp")
        os.mkdir(work)
        os.mkdir(tmp)
        return Folders(work, tmp, folder)
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
    size = f"size={disk_mb}m,nr_inodes={_INODES},mode=700"
    kernel.mount("tmpfs", FILES, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
    for target in (WORK, TMP, SHM):
        source = f"{FILES}/{os.path.basename(target)}"
        os.mkdir(source, 0o700)
        kernel.mount(source, target, "", kernel.MS_BIND)
    # Both buffers of a TCP connection together get the size of other sockets'; the default is dozens of MiB.
    for name, start in (("tcp_rmem", 65536), ("tcp_wmem", 16384)):
        with open(f"/proc/sys/net/ipv4/{name}", "w", encoding="ascii") as file:
            file.write(f"4096 {start} {_TCP_BUFFER}")
    _mount_proc(memory_mb)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    socket.sethostname("sandbox")
    return Folders(WORK, TMP, "")


def _mount_proc(memory_mb: int) -> None:
    """Mounts a `/proc` that shows the run's processes and two files made here; everything else is hidden by unreadable
    mounts."""
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    doors = f"{FILES}/proc"
    os.mkdir(doors)
    os.mkdir(f"{doors}/folder", 0)
    written = _proc_files(memory_mb)
    for name, text in {"file": "", **written}.items():
        with open(
            os.open(f"{doors}/{name}", os.O_CREAT | os.O_WRONLY, 0o444 if text else 0), "w", encoding="ascii"
        ) as file:
            file.write(text)
    kernel.mount(doors, FILES, "", kernel.MS_BIND)
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("", FILES, "", flags)
    for entry in list(os.scandir("/proc")):
        if entry.is_symlink() or entry.name.isdigit():
            continue
        door = entry.name if entry.name in written else "folder" if entry.is_dir() else "file"
        kernel.mount(f"{FILES}/{door}", entry.path, "", kernel.MS_BIND)


def _proc_files(memory_mb: int) -> dict[str, str]:
    """Returns the `/proc` files that show the program its memory limit, and nothing of the host that it could not measure
    itself."""
    amounts = {"MemTotal": memory_mb, "MemFree": memory_mb, "MemAvailable": memory_mb}
    amounts |= dict.fromkeys(("Buffers", "Cached", "Active", "Inactive", "Shmem", "Slab", "SwapTotal", "SwapFree"), 0)
    cpus = ("cpu", *(f"cpu{i}" for i in range(len(os.sched_getaffinity(0)))))
    booted = int(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))
    return {
        "meminfo": "".join(f"{name + ':':<16}{amount << 10:>8} kB\n" for name, amount in amounts.items()),
        "stat": "".join(f"{cpu} 0 0 0 0 0 0 0 0 0 0\n" for cpu in cpus) + f"btime {booted}\n",
    }
