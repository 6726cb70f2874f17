"""Control groups (cgroup v2) for containers, in a delegated folder.

The folder is configured; by default it is the one that systemd has delegated and that this process runs in.
Invariant: nothing outside the delegated folder is ever written, and in it only the groups created here and its list of
controllers; a folder that is not a delegated cgroup v2 is rejected. Each container gets its own group, which contains its
supervisor and all descendants, and is removed when the last of them has exited.
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
_MARKS = ("user.delegate", "trusted.delegate")  # extended attributes that systemd sets for units with `Delegate=yes`
_NEEDED = ("cpu", "memory", "pids")
_SUPERVISOR_MB = 64
_SUPERVISOR_PROCESSES = 2  # the supervisor and the prepared process
_PERIOD = 100_000


class Group:
    """The control group of one container."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def admit(self, pid: int) -> None:
        """Moves a process into the group; children that it starts later are in it too."""
        self._write("cgroup.procs", str(pid))

    def limit(self, limits: Limits, cpus: float) -> None:
        """Limits memory (including the container's files and kernel memory), processes, and CPUs used at a time."""
        self._write("memory.max", str((limits.memory_mb + limits.disk_mb + _SUPERVISOR_MB) << 20))
        if (self._folder / "memory.swap.max").exists():
            self._write("memory.swap.max", "0")
        self._write("pids.max", str(limits.processes + _SUPERVISOR_PROCESSES))
        self._write("cpu.max", f"{max(1000, int(cpus * _PERIOD))} {_PERIOD}")

    def out_of_memory(self) -> bool:
        """Whether the kernel's OOM killer killed a process of the group."""
        with contextlib.suppress(OSError):
            for line in (self._folder / "memory.events").read_text(encoding="ascii").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count) > 0
        return False

    def close(self) -> None:
        """Removes the group, whose processes must have exited."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _write(self, name: str, text: str) -> None:
        try:
            (self._folder / name).write_text(text, encoding="ascii")
        except OSError as error:
            raise SandboxError(f"cgroup {self._folder / name}: {error.strerror}") from error


class Delegation:
    """A delegated cgroup folder."""

    def __init__(self, folder: str) -> None:
        """Enables the needed controllers in the folder.

        Raises:
            ConfigError: it is not a cgroup v2 with the controllers `cpu`, `memory` and `pids`, or is not writable.
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
        """Creates a group; raises SandboxError if that fails."""
        folder = self._folder / f"etude-{uuid.uuid4().hex}"
        try:
            folder.mkdir()
        except OSError as error:
            raise SandboxError(f"cgroup {folder}: {error.strerror}") from error
        return Group(folder)

    def try_out(self) -> None:
        """Tests the delegation: moves a process into a limited group, and removes both.

        Raises:
            SandboxError: a group cannot be created, limited or joined.
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
    """Returns the delegation for `ExecutorOptions.cgroup`: None, the given folder, or for "auto" the one this process runs
    in.

    With "auto", a delegation that does not work is logged and not used.

    Raises:
        ConfigError: the given folder is not delegated.
    """
    if setting != AUTO:
        return None if setting is None else Delegation(setting)
    folder = _delegated_around()
    if folder is None:
        return None
    try:
        delegation = Delegation(str(folder))
        delegation.try_out()
    except (ConfigError, SandboxError, OSError) as error:
        log.warning("sandbox: runs get no control groups, as the delegated one does not work: %s", error)
        return None
    return delegation


def _delegated_around(proc: Path = Path("/proc/self")) -> Path | None:
    """Returns this process's cgroup v2 group, or its nearest ancestor, that is marked as delegated."""
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
