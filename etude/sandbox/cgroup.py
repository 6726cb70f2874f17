"""Control groups for runs, in a delegated cgroup v2 folder.

The user names the folder; by default it is the one around this process that systemd has marked as delegated.
Invariant: nothing outside the delegated folder is ever written, and in it only groups created here (and their list of
controllers) are; a folder that is not a delegated cgroup v2 is refused. Each box gets its own group, which holds its
supervisor and all its descendants, and is removed when the last of them is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import uuid
from pathlib import Path

from etude.errors import ConfigError
from etude.sandbox.types import Limits, SandboxError

log = logging.getLogger(__name__)

AUTO = "auto"
_MARKS = ("user.delegate", "trusted.delegate")  # systemd's, on the groups of units with `Delegate=yes`
_NEEDED = ("cpu", "memory", "pids")
_SUPERVISOR_MB = 64
_SUPERVISOR_PROCESSES = 2  # and the prepared process
_PERIOD = 100_000


class Group:
    """One box's group."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def admit(self, pid: int) -> None:
        """Moves a process in; its later children start inside."""
        self._write("cgroup.procs", str(pid))

    def limit(self, limits: Limits, cpus: float) -> None:
        """Bounds memory (files of the box in it, kernel memory included), processes, and CPUs at a time."""
        self._write("memory.max", str((limits.memory_mb + limits.disk_mb + _SUPERVISOR_MB) << 20))
        if (self._folder / "memory.swap.max").exists():
            self._write("memory.swap.max", "0")
        self._write("pids.max", str(limits.processes + _SUPERVISOR_PROCESSES))
        self._write("cpu.max", f"{max(1000, int(cpus * _PERIOD))} {_PERIOD}")

    def out_of_memory(self) -> bool:
        """Whether the kernel killed a process of the group for its memory."""
        with contextlib.suppress(OSError):
            for line in (self._folder / "memory.events").read_text(encoding="ascii").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count) > 0
        return False

    def close(self) -> None:
        """Removes the group, whose processes must be gone."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _write(self, name: str, text: str) -> None:
        try:
            (self._folder / name).write_text(text, encoding="ascii")
        except OSError as error:
            raise SandboxError(f"cgroup {self._folder / name}: {error.strerror}") from error


class Delegation:
    """A delegated folder."""

    def __init__(self, folder: str) -> None:
        """Takes a folder under control.

        Raises:
            ConfigError: it is not a cgroup v2 with the controllers `cpu`, `memory` and `pids`, or we may not write it.
        """
        self._folder = Path(folder)
        try:
            offered = (self._folder / "cgroup.controllers").read_text(encoding="ascii").split()
        except OSError as error:
            raise ConfigError(f"sandbox cgroup: '{folder}' is not a cgroup v2 folder") from error
        missing = [name for name in _NEEDED if name not in offered]
        if missing:
            raise ConfigError(f"sandbox cgroup: '{folder}' has no controller {', '.join(missing)}; delegate it")
        if not (self._folder.parent / "cgroup.controllers").exists():
            raise ConfigError(f"sandbox cgroup: '{folder}' is the root of all groups; name a delegated one below it")
        try:
            enabled = (self._folder / "cgroup.subtree_control").read_text(encoding="ascii").split()
            wanted = " ".join(f"+{name}" for name in _NEEDED if name not in enabled)
            if wanted:
                (self._folder / "cgroup.subtree_control").write_text(wanted, encoding="ascii")
        except OSError as error:
            raise ConfigError(
                f"sandbox cgroup: '{folder}' is not delegated to this user, or holds processes: {error.strerror}"
            ) from error

    def group(self) -> Group:
        """A new group.

        Raises:
            SandboxError: it cannot be made.
        """
        folder = self._folder / f"etude-{uuid.uuid4().hex}"
        try:
            folder.mkdir()
        except OSError as error:
            raise SandboxError(f"cgroup {folder}: {error.strerror}") from error
        return Group(folder)

    def try_out(self) -> None:
        """Moves a process into a limited group and removes both.

        Raises:
            SandboxError: that is not possible.
        """
        group = self.group()
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            try:
                group.limit(Limits(), cpus=1.0)
                group.admit(process.pid)
            finally:
                process.kill()
        group.close()


def find_delegation(setting: str | None) -> Delegation | None:
    """The folder that `ExecutorOptions.cgroup` means: none, the one named, or for "auto" the one this process lives under.

    A detected delegation that does not work is logged and not used.

    Raises:
        ConfigError: the folder that was named is not delegated.
    """
    if setting != AUTO:
        return None if setting is None else Delegation(setting)
    folder = _delegated_around()
    if folder is None:
        return None
    try:
        found = Delegation(str(folder))
        found.try_out()
    except (ConfigError, SandboxError, OSError) as error:
        log.warning("sandbox: runs get no control groups, as the delegated one does not work: %s", error)
        return None
    return found


def _delegated_around(proc: Path = Path("/proc/self")) -> Path | None:
    """The nearest cgroup v2 ancestor of this process that is marked as delegated."""
    mounts = (line.split() for line in (proc / "mountinfo").read_text(encoding="utf-8").splitlines())
    top = next((Path(fields[4]) for fields in mounts if fields[fields.index("-") + 1] == "cgroup2"), None)
    groups = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
    own = next((line.removeprefix("0::/") for line in groups if line.startswith("0::/")), None)
    if top is None or not own:
        return None
    return next(
        (folder for folder in (top / own, *(top / own).parents) if top in folder.parents and _marked(folder)), None
    )


def _marked(folder: Path) -> bool:
    for mark in _MARKS:
        with contextlib.suppress(OSError):
            return os.getxattr(folder, mark) == b"1"
    return False
