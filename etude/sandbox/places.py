"""An executor's folder on disk, which the unprivileged user who builds the jail can traverse."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from etude.sandbox.types import SandboxError
from etude.scratch import Scratch

_PREFIX = "etude-jail-"


def jail_scratch() -> Scratch:
    """A folder for one executor or fork server.

    Raises:
        SandboxError: the host is root, and every folder for temporary files is closed to others.
    """
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/run", "/dev/shm"):
        if os.geteuid() != 0 or _passable(Path(base).resolve()):
            return Scratch.make(_PREFIX, base)
    raise SandboxError("no folder for temporary files is open to other users; set TMPDIR to one that is")


def _passable(folder: Path) -> bool:
    return folder.is_dir() and all(path.stat().st_mode & 0o001 for path in (folder, *folder.parents))
