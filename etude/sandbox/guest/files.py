"""Copies files into and out of a work directory that the program may have tampered with.

Invariant: nothing outside the directory is ever opened, despite any links, pipes, devices or races in it: the kernel
resolves paths beneath it without following links, and only regular files are read. Sizes are checked on the open descriptor
and again while reading. Whole folders (`pack`, `unpack`) are copied only while no process can change them.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence

from . import kernel

FOLDER_BYTES = 64 << 20
"""Most bytes of a folder that is copied as a whole."""


def write_files(directory: str, files: Sequence[tuple[str, bytes]]) -> None:
    """Writes each (relative path, content), creating folders as needed.

    Raises:
        OSError: there is no space, or a path cannot be created.
    """
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path, content in files:
            parts = path.split("/")
            for depth in range(1, len(parts)):
                _make_folder(root, parts[:depth])
            parent = _open_folder(root, parts[:-1])
            try:
                _replace(parent, parts[-1], content)
            finally:
                os.close(parent)
    finally:
        os.close(root)


def _open_folder(root: int, parts: Sequence[str]) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    return kernel.open_beneath(root, "/".join(parts) or ".", flags)


def _make_folder(root: int, parts: Sequence[str]) -> None:
    parent = _open_folder(root, parts[:-1])
    try:
        os.mkdir(parts[-1], 0o755, dir_fd=parent)
    except FileExistsError:
        pass
    finally:
        os.close(parent)


def _replace(parent: int, name: str, content: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o644, dir_fd=parent)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def read_files(directory: str, paths: Sequence[str], budget: int) -> tuple[list[tuple[str, bytes]], dict[str, str]]:
    """Reads the regular files among `paths`, at most `budget` bytes together; also returns, for each other path that
    exists, why it was not read."""
    found: list[tuple[str, bytes]] = []
    refused: dict[str, str] = {}
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path in paths:
            try:
                content = _read(root, path, budget)
            except FileNotFoundError:
                continue
            except OSError as error:
                refused[path] = error.strerror or str(error)
                continue
            budget -= len(content)
            found.append((path, content))
    finally:
        os.close(root)
    return found, refused


def _read(root: int, path: str, budget: int) -> bytes:
    # Without O_NONBLOCK, opening a pipe would wait for a writer that never comes.
    fd = kernel.open_beneath(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a plain file")
        if status.st_size > budget:
            raise OSError(0, f"{status.st_size} bytes are more than may be fetched")
        parts = []
        while part := os.read(fd, 1 << 20):  # a session's background process may still append to it
            budget -= len(part)
            if budget < 0:
                raise OSError(0, "larger than may be fetched")
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yields all that is below `folder` and can be listed, each folder before what is in it; no link is followed. (Unlike
    `os.walk` before Python 3.12, whatever the depth.)"""
    waiting = [folder]
    while waiting:
        found: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as listed:
            found = list(listed)
        for entry in found:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)


def pack(folder: str, budget: int) -> bytes | None:
    """Returns a tar archive of the files, folders and links in `folder` that can be read; None if they are above `budget`
    bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for entry in entries(folder):
            status = entry.stat(follow_symlinks=False)
            if not any(kind(status.st_mode) for kind in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)):
                continue
            budget -= status.st_size + 2 * tarfile.BLOCKSIZE
            if budget < 0:
                return None
            archive.inodes.clear()  # type: ignore[attr-defined]  # a hard link becomes a copy
            with contextlib.suppress(PermissionError):
                archive.add(entry.path, os.path.relpath(entry.path, folder), recursive=False)
    return packed.getvalue()


def unpack(folder: str, packed: bytes) -> None:
    """Writes an archive of `pack` into an empty folder. Whoever made it, nothing is written outside, and no link leads
    there: links, of which only relative ones are made, come last.

    Raises:
        OSError: there is no space, or the archive is damaged.
    """
    links: list[tuple[str, str]] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
            for member in archive:
                if any(part in ("", ".", "..") for part in member.name.split("/")):
                    raise OSError(0, f"{member.name!r} is no path in a folder")
                path = os.path.join(folder, member.name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                if member.isdir():
                    os.makedirs(path, exist_ok=True)
                elif member.issym() and _stays(member.name, member.linkname):
                    links.append((member.linkname, path))
                elif member.isreg() and (content := archive.extractfile(member)):
                    with open(path, "xb") as file:
                        os.fchmod(file.fileno(), 0o600 | member.mode & 0o777)
                        file.write(content.read())
    except tarfile.TarError as error:
        raise OSError(0, f"a damaged archive: {error}") from error
    for target, path in links:
        os.symlink(target, path)


def _stays(name: str, target: str) -> bool:
    """Whether a link at `name` leads into the folder, whatever links its target goes through: it goes up only first."""
    parts = target.split("/")
    up = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    return not target.startswith("/") and up <= name.count("/") and ".." not in parts[up:]
