"""Copies files into and out of a work directory that the program may have tampered with.

Invariant: nothing outside the directory is ever opened, despite any links, pipes, devices or races in it: the kernel
resolves paths beneath it without following links, and only regular files are read. Sizes are checked on the open descriptor
and again while reading.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence

from . import kernel


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
