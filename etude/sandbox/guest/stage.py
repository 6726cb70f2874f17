"""A root host's first step: mounts what the jail needs at accessible places, then drops root.

Invariant: whatever comes after this step, bubblewrap or our own launcher, runs as an unprivileged user that owns nothing
and has no capabilities; the mounts made here are visible only to it and its descendants.
"""

from __future__ import annotations

import json
import os
import sys

from . import kernel, launch
from .identity import become


def main(arguments: list[str]) -> None:
    """Takes the staging as JSON, then either `namespaces` and the launcher's arguments, or `execute` and a command."""
    staging, kind, rest = json.loads(arguments[0]), arguments[1], arguments[2:]
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        for source, place in staging["binds"]:
            kernel.mount(source, place, "", kernel.MS_BIND | kernel.MS_REC)
        become(staging["host_id"])
        os.chdir("/")
        if kind == "execute":
            os.execve(rest[0], rest, dict(os.environ))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(1)
    launch.main(rest)
