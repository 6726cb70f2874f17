r"""`Corpus`: a JSON-lines file of passages, read through a memory map.

A line is `{id, contents}`, as in Search-R1, where the first line of `contents` is the title, or `{id, title, text}`. In
both cases the returned document has `contents`; other keys are kept.

Invariant: an opened corpus has exactly the bytes that its index was built from: the size must match, and if the
modification time differs, the SHA-256 is computed again.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.errors import DataError, one_line
from etude.scratch import sha256_of

MAX_LINE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Fingerprint:
    """The size and SHA-256 of a corpus file; `modified`: its modification time in nanoseconds, to avoid hashing it again."""

    size: int
    modified: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Fingerprint:
        """Returns the fingerprint of a file, which is read completely."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, sha256_of(path))

    def fits(self, path: Path) -> bool:
        """Whether the file `path` has this fingerprint's bytes."""
        status = path.stat()
        if status.st_size != self.size:
            return False
        return status.st_mtime_ns == self.modified or Fingerprint.of(path).sha256 == self.sha256


class Corpus:
    """The passages of the file `path`; `spans`: per row (start, size, whether it has `contents`), (rows, 3) int64.

    Raises:
        DataError: the file cannot be read; names it.
    """

    def __init__(self, path: Path, spans: np.ndarray) -> None:
        self.path, self._spans = path, spans
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read: {one_line(error)}") from error

    def __len__(self) -> int:
        return len(self._spans)

    def document(self, row: int) -> dict[str, Any]:
        """Returns a row's document, with `contents`."""
        document = json.loads(self._line(row))
        if "contents" not in document:
            document["contents"] = contents_of(document)
        return document

    def document_json(self, row: int) -> bytes:
        """Returns a row's document as JSON. A line with `contents` is returned unparsed, since parsing would take half of a
        query's time."""
        return self._line(row) if self._spans[row, 2] else json.dumps(self.document(row)).encode()

    def _line(self, row: int) -> bytes:
        start, size, _ = self._spans[row].tolist()
        return self._bytes[start : start + size]

    def contents(self, rows: range) -> Iterator[str]:
        """Yields the texts of these rows that are indexed."""
        return (contents_of(json.loads(self._line(row))) for row in rows)


def scan(path: Path) -> tuple[np.ndarray, Fingerprint]:
    """Returns the spans of a corpus file's rows, as `Corpus` takes them, and its fingerprint; empty lines are skipped.

    Raises:
        DataError: the file cannot be read or has no rows, a row is malformed, or an id is not unique; names file and line.
    """
    spans, lines, ids, digest = array("q"), array("q"), array("Q"), hashlib.sha256()
    start = 0
    try:
        status = path.stat()
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                digest.update(line)
                skipped = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
                row = line[skipped:].rstrip(b"\r\n")
                if row.strip():
                    document = _parse_document(row, f"{path}:{number}")
                    spans.extend((start + skipped, len(row), "contents" in document))
                    lines.append(number)
                    name = hashlib.blake2b(repr(document["id"]).encode(), digest_size=8).digest()
                    ids.append(int.from_bytes(name, "big"))
                start += len(line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error
    if not spans:
        raise DataError(f"{path}: the file holds no passages")
    _reject_duplicates(path, np.asarray(ids), np.asarray(lines))
    return np.asarray(spans).reshape(-1, 3), Fingerprint(status.st_size, status.st_mtime_ns, digest.hexdigest())


def _parse_document(line: bytes, where: str) -> dict[str, Any]:
    if len(line) >= MAX_LINE_BYTES:
        raise DataError(f"{where}: the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        document = json.loads(line, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {one_line(error)}") from error
    if not isinstance(document, dict) or not {"contents", "text"} & document.keys() or "id" not in document:
        raise DataError(f"{where}: needs 'id' and 'contents', or 'id', 'title' and 'text'")
    texts = (document.get(key, "") for key in ("contents", "title", "text"))
    if type(document["id"]) not in (str, int) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where}: 'id' must be text or a whole number, 'contents', 'title' and 'text' must be text")
    return document


def _reject_duplicates(path: Path, ids: np.ndarray, lines: np.ndarray) -> None:
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if len(again):
        first, second = lines[order[again[0] : again[0] + 2]].tolist()
        raise DataError(f"{path}:{second}: the id is that of line {first}, too")


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def contents_of(document: dict[str, Any]) -> str:
    """Returns a passage in Search-R1's format: the title in quotes, a line break, the text."""
    found = document.get("contents")
    return f'"{document.get("title", "")}"\n{document["text"]}' if found is None else str(found)
