"""Builds the jail with system calls only and starts the fork server in it (mode `namespaces`). If the host runs as root, in
both modes it first binds the paths that the jail needs to accessible places, and drops root.

Invariant: the fork server is a newly executed interpreter whose root contains only what the plan lists; if a step fails,
nothing is started. The steps and their order are bubblewrap's. If the host runs as root, everything after dropping it runs
as an unprivileged user that owns nothing and has no capabilities; the mounts made before are visible only to it and its
descendants.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from . import kernel


def main(arguments: list[str]) -> None:
    """Starts the fork server, and exits when it does. `arguments`: the plan as JSON, the user to switch to (-1: none), the
    mode, and the command to execute: in the jail built here, or directly in mode "bubblewrap", which builds its own."""
    plan, host_id, mode, command = json.loads(arguments[0]), int(arguments[1]), arguments[2], arguments[3:]
    try:
        if host_id >= 0:
            _drop_root(plan["staged"], host_id)
        if mode == "bubblewrap":
            os.execve(command[0], command, dict(os.environ))
        # Not as root of the namespace: files of a supervisor's `/proc` that are closed to its own user belong to the root
        # of the namespace it was started in, and a program runs as the same user.
        kernel.enter_user_namespace(os.geteuid(), kernel.ALL_NAMESPACES & ~kernel.CLONE_NEWUSER)
        pid = os.fork()
        if pid == 0:
            kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
            _build_root(plan)
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            os.execve(command[0], command, dict(os.environ))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(1)
    os.closerange(3, 256)  # only the fork server may hold its end of the socket
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)


def _drop_root(staged: list[list[str]], host_id: int) -> None:
    """Binds each staged path where the jail's user can reach it, and switches permanently to that user and group."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    for source, place in staged:
        kernel.mount(source, place, "", kernel.MS_BIND | kernel.MS_REC)
    os.setgroups([])
    os.setresgid(host_id, host_id, host_id)
    os.setresuid(host_id, host_id, host_id)
    os.chdir("/")


def _build_root(plan: dict[str, Any]) -> None:
    root = plan["root"]
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.umask(0o022)
    for folder in plan["folders"]:
        os.makedirs(root + folder, exist_ok=True)
    for target, link in plan["links"]:
        os.symlink(target, root + link)
    for source, target in plan["binds"]:
        _bind(source, root + target)
        kernel.make_read_only(root + target)
    for device in plan["devices"]:
        _bind(device, root + device)
    # Before the host's `/proc` is hidden: the kernel mounts a new one only if a complete one is visible.
    kernel.mount("proc", root + "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.chdir(root)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("", "/", "", flags)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, target, "", kernel.MS_BIND | kernel.MS_REC)
