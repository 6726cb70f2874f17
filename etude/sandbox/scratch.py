"""Folders for what an executor keeps on disk while it lives.

Invariant: a folder is locked by the process that made it for as long as that process lives, so that whoever makes the next
one can tell, and removes those that a killed process has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from etude.sandbox.types import SandboxError

_PREFIX = "etude-jail-"
_STALE_SECONDS = 3600.0  # of a folder without a lock: whoever was making or removing it was killed


@dataclass(frozen=True)
class Scratch:
    """A private folder and the descriptor of its lock."""

    folder: Path
    lock: int

    @classmethod
    def make(cls) -> Scratch:
        """A new one, which the unprivileged user who builds the jail can pass through.

        Raises:
            SandboxError: the host is root, and every folder for temporary files is closed to others.
        """
        for base in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/run", "/dev/shm"):
            if os.geteuid() != 0 or _passable(Path(base).resolve()):
                _sweep(Path(base))
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
                lock = os.open(folder / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX)
                (folder / "new").rename(folder / "lock")  # locked before anybody can find it
                return cls(folder, lock)
        raise SandboxError("no folder for temporary files is open to other users; set TMPDIR to one that is")

    def remove(self) -> None:
        """Removes the folder; nothing is mounted there in the host's own namespace."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


def _passable(folder: Path) -> bool:
    return folder.is_dir() and all(path.stat().st_mode & 0o001 for path in (folder, *folder.parents))


def _sweep(base: Path) -> None:
    for left in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            try:
                lock = os.open(left / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                if time.time() - left.lstat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
