"""Temporary folders that live as long as their process; `write_whole`: folders that are complete or absent; and what else is
done with whole files and folders.

Invariant: a temporary folder is locked by the process that created it for as long as that process lives, so that the next
process that creates one on the same host can remove those of killed processes. Folders of other hosts are left alone: on a
shared file system, locks may be visible on one host only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.errors import CheckpointError, one_line

INCOMPLETE = ".incomplete-"
"""What the names of folders and files that are being written begin with."""

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


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time make `folder`, by a lock file beside it; others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("a") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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


@contextlib.contextmanager
def write_whole(target: Path, advice: str = "free space or set trainer.default_local_dir") -> Iterator[Path]:
    """Yields a temporary folder that atomically replaces `target` if the block succeeds, and is removed otherwise.

    Raises:
        CheckpointError: the folder could not be written, for instance because the disk is full; an existing `target` stays
            intact.
    """
    temporary, backup = target.with_name(f"{INCOMPLETE}{target.name}"), backup_path(target)
    try:
        for left in (temporary, backup):  # left by a run that was killed while writing
            remove_path(left)
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync_path(path)  # contents reach the disk before the rename
        if target.exists():
            os.replace(target, backup)
        os.replace(temporary, target)
        sync_path(target.parent)
        shutil.rmtree(backup, ignore_errors=True)
    except BaseException as error:
        reason = f"{one_line(error).replace(f'{temporary}/', '')} ({_free(target.parent)} free)"
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, (OSError, CheckpointError)):
            raise CheckpointError(f"cannot write {target}: {reason}; {advice}") from error
        raise


def backup_path(target: Path) -> Path:
    """Where `write_whole` puts the folder that it replaces, until the new one is in its place."""
    return target.with_name(f"{INCOMPLETE}replaced-{target.name}")


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB"
    except OSError:
        return "unknown space"


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def free_path(path: Path) -> Path:
    """Returns the first of `rollouts.1`, `rollouts.2` … (of a file: `metrics.1.jsonl` …) beside `path` that is not taken."""
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    number = 1
    while (free := path.with_name(f"{stem}.{number}{suffix}")).exists():
        number += 1
    return free


def remove_path(path: Path) -> None:
    """Removes a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
