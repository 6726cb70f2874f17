"""The identity of a process: user namespaces, and dropping root.

Invariant: inside a namespace made here exactly one user and one group exist, mapped to the caller's own outside;
no id can be mapped or switched to afterwards.
"""

from __future__ import annotations

import os

from . import kernel


def become(host_id: int) -> None:
    """Gives up root for user and group `host_id`, for good."""
    os.setgroups([])
    os.setresgid(host_id, host_id, host_id)
    os.setresuid(host_id, host_id, host_id)


def enter_user_namespace(inner_id: int, further_flags: int = 0) -> None:
    """A new user namespace (and those of `further_flags`) in which this process's user and group are `inner_id`."""
    user, group = os.geteuid(), os.getegid()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or /proc/self would belong to the host's root
    kernel.unshare(kernel.CLONE_NEWUSER | further_flags)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inner_id} {user} 1"),
        ("gid_map", f"{inner_id} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "wb", buffering=0) as file:
            file.write(text.encode())
