"""`JsonLines`: a file of JSON lines that many tasks, threads and processes append to at once.

Invariant: a line is written by one system call to a file opened for appending, so lines never mix; nothing is buffered,
so a killed process loses no line that it wrote. A line is one JSON object and ends with a newline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.errors import ConfigError, DataError, one_line


class JsonLines:
    """The file `path`; opened by the first `append` of each process."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._descriptor: tuple[int, int] | None = None  # (process, file)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line; a value that JSON cannot hold is written as its `repr`.

        Raises:
            ConfigError: the file cannot be written.
        """
        data = (json.dumps(record, ensure_ascii=True, separators=(",", ":"), default=repr) + "\n").encode()
        try:
            if self._descriptor is None or self._descriptor[0] != os.getpid():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = (os.getpid(), os.open(self.path, flags, 0o644))
            written = os.write(self._descriptor[1], data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written: {one_line(error)}") from error

    def close(self) -> None:
        """Closes the file; a later `append` opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and descriptor[0] == os.getpid():
            os.close(descriptor[1])

    def __del__(self) -> None:
        self.close()


def read_json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line that is not empty.

    Raises:
        DataError: the file cannot be read, or a line is no JSON object; names file and line.
    """
    path = Path(path).expanduser()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}: line {number} is no JSON: {one_line(error)}") from error
                if not isinstance(record, dict):
                    raise DataError(f"{path}: line {number} is no JSON object")
                yield number, record
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error
