"""Temporary folders that live as long as their process.

Invariant: a folder is locked by the process that created it for as long as that process lives, so that the next process that
creates one on the same host can remove those of killed processes. Folders of other hosts are left alone: on a shared file
system, locks may be visible on one host only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_MAX_NAME_BYTES = 1024
_STALE_SECONDS = 3600.0  # after which a folder without a lock file is stale: its process was killed


@dataclass(frozen=True)
class Scratch:
    """A private folder and the descriptor of its lock."""

    folder: Path
    lock: int

    @classmethod
    def make(cls, prefix: str, base: str | os.PathLike[str] | None = None) -> Scratch:
        """Creates one in `base` (default: the temporary directory); removes those with this prefix whose process has ended.

        Raises:
            OSError: `base` is not writable.
        """
        where = Path(base or tempfile.gettempdir())
        sweep(where, prefix)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
        lock = os.open(folder / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: then `sweep` cannot take the lock either
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, _host())
        (folder / "new").rename(folder / "lock")  # locked before another process can see it
        return cls(folder, lock)

    def remove(self) -> None:
        """Removes the folder with its contents."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


def sweep(base: Path, prefix: str) -> None:
    """Removes folders in `base` with this prefix whose process, on this host, has ended."""
    for left in base.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            try:
                lock = os.open(left / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                if time.time() - left.lstat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
                continue
            try:
                if os.read(lock, _MAX_NAME_BYTES) == _host():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _host() -> bytes:
    return socket.gethostname().encode()[:_MAX_NAME_BYTES]
