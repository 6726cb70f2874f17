"""Builds the jail with system calls only, and starts the fork server in it: the mode `namespaces`.

Invariant: the fork server is a freshly executed interpreter whose root holds the read-only binds of the plan and nothing
else; when any step fails, nothing is started. The steps and their order are bubblewrap's.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from . import kernel
from .identity import enter_user_namespace

_OTHER_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)


def main(arguments: list[str]) -> None:
    """Takes the plan as JSON and the fork server's command line; ends when the fork server does."""
    plan, command = json.loads(arguments[0]), arguments[1:]
    try:
        # Not as its root: what of a supervisor is closed to its own user belongs to the root of the namespace it was
        # started in, and a program is the same user.
        enter_user_namespace(os.geteuid(), _OTHER_NAMESPACES)
        pid = os.fork()
        if pid == 0:
            kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
            _build_root(plan)
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            os.execve(command[0], command, dict(os.environ))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(1)
    os.closerange(3, 256)  # the fork server must be the only one to hold its end of the socket
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)


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
    # Before the host's own is hidden: the kernel mounts a new one only if a complete one is visible.
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
