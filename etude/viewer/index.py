"""`RolloutIndex`: indexes the trajectories of a run folder, a folder of dumps or a single dump.

Invariant: memory holds one `Row` per trajectory, with two lines of its text; the full record is read by offset on demand.
A line that is not a trajectory is listed in `bad` and never aborts the scan. `refresh` is incremental: it reads new dumps,
appended lines and replaced files only. Étude's and verl's dumps are supported. Searches and reads are bounded in time and
bytes. `refresh` takes a lock; every other method may run concurrently with it.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from etude.dumps import list_dump_steps
from etude.errors import ConfigError, DataError, one_line
from etude.run_folder import CONFIG_FILE, METRICS_FILE, read_config
from etude.viewer.query import Filter
from etude.viewer.rows import Row, as_dict, parse_light, parse_line, parse_row, texts_of

MAX_LINE_BYTES = 64 * 2**20
MAX_BAD = 1000  # bad lines listed per file; the rest are only counted
_TAIL = 64  # bytes kept before the last read position, to tell an appended file from a rewritten one
_SPLITS = {"rollouts": "train", "validation": "validation"}
_KEYS = {"rollouts": "rollout_data_dir", "validation": "validation_data_dir"}  # of `trainer`, which set others
_NOT_DUMPS = (METRICS_FILE, "traces.jsonl")

_EVERYTHING = Filter()
_PLAIN_RUN = re.compile(r"[A-Za-z0-9 ]+")


SORTS: dict[str, Callable[[Row], Any]] = {
    "step": lambda row: row.step,
    "score": lambda row: row.score,
    "turns": lambda row: row.turns,
    "calls": lambda row: row.calls,
    "tokens": lambda row: row.response_tokens,
    "seconds": lambda row: row.seconds,
    "stop_reason": lambda row: row.stop_reason or None,
    "data_source": lambda row: row.data_source or None,
}


@dataclass(frozen=True)
class BadLine:
    """A line that is not a trajectory, or an unreadable file (line 0)."""

    place: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """The selected rows, sorted; `searched` of `total` candidates were searched for the text before the time limit."""

    rows: list[Row]
    searched: int
    total: int

    @property
    def complete(self) -> bool:
        """Whether every candidate was searched."""
        return self.searched == self.total


@dataclass
class _File:
    """Read state of one dump. `end` is the offset of the first unread byte."""

    name: str
    split: str
    path: Path
    rows: list[Row] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)
    bad_lines: int = 0
    end: int = 0
    lines: int = 0
    tail: bytes = b""
    cut: bool = False  # the last line is incomplete
    seen: tuple[int, int, int] | None = None  # (inode, size, mtime); None until read to the end

    def add_bad(self, line: int, reason: str) -> None:
        self.bad_lines += 1
        if len(self.bad) < MAX_BAD:
            self.bad.append(BadLine(f"{self.name}:{line}", reason))


class RolloutIndex:
    """The rows of `path`, sorted by step; empty until the first `refresh`.

    Args:
        named: split ("train", "validation") → its dump folder, where that is not the run's own or its configuration's.
        ends: read the first and the last dump of each folder only.

    Raises:
        DataError: `path` does not exist.
    """

    def __init__(self, path: Path | str, named: Mapping[str, Path] | None = None, *, ends: bool = False) -> None:
        path = Path(path).expanduser()
        if not path.exists():
            raise DataError(f"{path}: no such file or folder; name a run's folder, a folder of rollout dumps or a dump")
        self.path = path
        self.root = path if path.is_dir() else path.parent
        self._named, self._ends = named or {}, ends
        self.rows: list[Row] = []
        self.version = 0  # incremented whenever the rows change
        self.complete = False  # whether the last refresh read everything
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()

    # -- reading -------------------------------------------------------------------------------------------------

    def refresh(self, seconds: float | None = None) -> bool:
        """Reads what was written since the last call for at most about `seconds`; returns whether rows or bad lines changed.

        If the time ran out, `complete` is False and the next call continues.
        """
        with self._lock:
            deadline = math.inf if seconds is None else time.monotonic() + seconds
            dumps = {name: (split, path) for split, name, path in _list_dumps(self.path, self._named, self._ends)}
            changed = read = False
            for name in [name for name in self._files if name not in dumps]:
                changed |= bool(self._files.pop(name).rows)
            self.complete = True
            for name, (split, path) in dumps.items():
                if read and time.monotonic() > deadline:
                    self.complete = False
                    break
                file = self._files.setdefault(name, _File(name, split, path))
                end = file.end
                changed |= self._read_file(file, deadline)
                read |= self._files[name].end != end  # each call makes progress, even if the deadline has passed
            if changed:
                rows = [row for file in self._files.values() for row in file.rows]
                self.rows = sorted(rows, key=lambda row: (row.step, split_order(row.split)))
                self.version += 1
            return changed

    @property
    def bad(self) -> list[BadLine]:
        """Lines that are not trajectories, at most `MAX_BAD` per file."""
        return [line for file in list(self._files.values()) for line in file.bad]

    @property
    def bad_lines(self) -> int:
        """Number of bad lines, including those not listed in `bad`."""
        return sum(file.bad_lines for file in list(self._files.values()))

    def _read_file(self, file: _File, deadline: float) -> bool:
        before = len(file.rows), file.bad_lines
        replaced = False
        try:
            with _open_regular(file.path) as stream:
                status = os.fstat(stream.fileno())
                now = (status.st_ino, status.st_size, status.st_mtime_ns)
                if file.seen == now:
                    return False
                if not _continues(file, stream, now):
                    replaced = bool(file.rows)
                    self._files[file.name] = file = _File(file.name, file.split, file.path)
                elif file.cut:
                    file.cut, file.bad_lines = False, file.bad_lines - 1
                    file.bad = [line for line in file.bad if line.place != f"{file.name}:{file.lines + 1}"]
                stream.seek(file.end)
                if _read_lines(file, stream, deadline):
                    file.seen = now
                else:
                    self.complete = False
        except OSError as error:
            if not file.bad:
                file.add_bad(0, f"cannot be read: {one_line(error)}")
        return replaced or before != (len(file.rows), file.bad_lines)

    def read(self, row: Row) -> dict[str, Any]:
        """Reads the full record of `row`.

        Raises:
            DataError: the file was replaced or cannot be read; names it.
        """
        return parse_line(self._read_bytes(row), row.place)

    def texts(self, row: Row) -> tuple[str, str]:
        """Reads the decoded prompt and response of `row`, without parsing token ids; raises like `read`."""
        record, _ = parse_light(self._read_bytes(row), row.place)
        return str(record.get("input") or ""), str(record.get("output") or "")

    def _read_bytes(self, row: Row) -> bytes:
        try:
            with _open_regular(self.root / row.name) as stream:
                stream.seek(row.offset)
                return stream.read(row.length)
        except OSError as error:
            raise DataError(f"{row.place}: cannot be read: {one_line(error)}") from error

    # -- selecting -----------------------------------------------------------------------------------------------

    def find(self, place: str) -> Row | None:
        """Returns the row at `place`, such as `rollouts/12.jsonl:3`; None if there is none."""
        name, _, line = place.rpartition(":")
        file = self._files.get(name)
        return next((row for row in file.rows if str(row.line) == line), None) if file else None

    def siblings(self, row: Row) -> list[Row]:
        """Returns the rollouts of the same prompt in the same step, including `row`."""
        return [each for each in self.rows if each.group == row.group]

    def select(
        self,
        wanted: Filter = _EVERYTHING,
        sort: str = "step",
        descending: bool = False,
        *,
        seconds: float = 10.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> Selection:
        """Returns the rows that `wanted` accepts, sorted by one of `SORTS`; rows without the sort value always come last.

        A text search stops after `seconds`, or once `stop()` returns True; see `Selection.complete`.

        Raises:
            ConfigError: the sort is unknown, or the pattern is malformed, too long or too slow.
        """
        if sort not in SORTS:
            raise ConfigError(f"no sort '{sort}'; known: {', '.join(SORTS)}")
        rows = [row for row in self.rows if wanted.accepts(row)]
        searched, total = len(rows), len(rows)
        if wanted.text:
            rows, searched = self._search(rows, wanted, time.monotonic() + seconds, stop)
        value = SORTS[sort]
        known = sorted((row for row in rows if value(row) is not None), key=value, reverse=descending)
        return Selection(known + [row for row in rows if value(row) is None], searched, total)

    def _search(
        self, rows: Sequence[Row], wanted: Filter, deadline: float, stop: Callable[[], bool]
    ) -> tuple[list[Row], int]:
        matches = wanted.text_matcher()
        matching: list[Row] = []
        hint = b"" if wanted.regex else max(_PLAIN_RUN.findall(wanted.text), key=len, default="").lower().encode()
        for searched, row in enumerate(rows):
            if time.monotonic() > deadline or stop():
                return matching, searched
            try:
                line = self._read_bytes(row)
                if hint in line.lower() and any(map(matches, texts_of(parse_light(line, row.place)[0]))):
                    matching.append(row)
            except DataError:  # the file was replaced meanwhile; the next refresh picks it up
                continue
        return matching, len(rows)


def split_order(split: str) -> tuple[bool, str]:
    """Sort key for splits: training comes first."""
    return split not in ("", "train"), split


def group_rows(rows: Iterable[Row]) -> dict[tuple[str, int, str], list[Row]]:
    """Groups rows by (split, step, prompt), in order of first appearance."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def count_values(rows: Iterable[Row]) -> dict[str, Counter[str]]:
    """Counts the stop reasons, data sources, tools, flags and splits of `rows`, for filter menus."""
    counts: dict[str, Counter[str]] = {
        name: Counter() for name in ("stop_reason", "data_source", "tool", "flag", "split")
    }
    for row in rows:
        counts["stop_reason"][row.stop_reason] += 1
        counts["data_source"][row.data_source] += 1
        counts["split"][row.split] += 1
        counts["tool"].update(row.tools)
        counts["flag"].update(row.flags)
    return counts


def _list_dumps(path: Path, named: Mapping[str, Path], ends: bool) -> Iterator[tuple[str, str, Path]]:
    """Yields (split, name, file) for each dump of `path`, sorted by step within a folder."""
    if not path.is_dir():
        yield "", path.name, path
        return
    is_dumps = bool(list_dump_steps(path))
    found = {path: _SPLITS.get(path.name, "")} if is_dumps else _run_folders(path, named)
    folders = {folder: split for folder, split in found.items() if folder.is_dir()}
    for folder, split in folders.items():
        steps = list_dump_steps(folder)
        for step in sorted({*steps[:1], *steps[-1:]}) if ends else steps:
            file = folder / f"{step}.jsonl"
            yield split, str(file.relative_to(path) if file.is_relative_to(path) else file.absolute()), file
    if not folders and not (path / CONFIG_FILE).exists():
        for file in sorted(path.glob("*.jsonl")):
            if file.name not in _NOT_DUMPS:
                yield "", file.name, file


def _run_folders(path: Path, named: Mapping[str, Path]) -> dict[Path, str]:
    """Dump folder → split: the `named` ones, else the run's own, else those of its configuration; and evaluations."""
    trainer, folders = as_dict(config_of(path).get("trainer")), {}
    for name, split in _SPLITS.items():
        own, configured = path / name, trainer.get(_KEYS[name])
        other = configured if isinstance(configured, str) and not own.is_dir() else ""
        folders[named.get(split) or Path(other or own)] = split
    evaluations = sorted({*path.glob("evaluation/*"), *path.glob("eval-*")})
    return folders | {each: str(each.relative_to(path)) for each in evaluations if each not in folders}


def config_of(folder: Path) -> Mapping[str, Any]:
    """Returns the configuration of the run in `folder`; empty if there is none that can be read."""
    file = folder / CONFIG_FILE
    return _parse_config(folder, file.stat().st_mtime_ns) if file.is_file() else {}


@lru_cache(maxsize=8)
def _parse_config(folder: Path, _modified: int) -> Mapping[str, Any]:
    try:
        return read_config(folder)
    except DataError:
        return {}


def _open_regular(path: Path) -> BinaryIO:
    """Opens a regular file; refuses anything else, since opening a named pipe would block."""
    if not path.is_file():
        raise OSError(f"{path} is no regular file")
    return path.open("rb")


def _continues(file: _File, stream: BinaryIO, now: tuple[int, int, int]) -> bool:
    """Whether the part already read is unchanged, so that the file was only appended to."""
    if file.seen is not None and (file.seen[0] != now[0] or now[1] <= file.seen[1]):
        return False
    stream.seek(file.end - len(file.tail))
    return now[1] >= file.end and stream.read(len(file.tail)) == file.tail


def _read_lines(file: _File, stream: BinaryIO, deadline: float) -> bool:
    """Reads lines from `end` on; returns False if the deadline passed first."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        offset, ended, fault = file.end, line.endswith(b"\n"), ""
        if not ended and len(line) > MAX_LINE_BYTES:
            fault = f"longer than {MAX_LINE_BYTES // 2**20} MiB"
            while line and not line.endswith(b"\n"):
                line = stream.readline(2**20)
        elif line.strip():
            where: dict[str, Any] = {"name": file.name, "number": file.lines + 1, "offset": offset, "split": file.split}
            try:
                file.rows.append(parse_row(line, **where))
            except DataError as error:
                fault = one_line(error, 200) if ended else "cut off, or still being written"
                file.cut = not ended
        if fault:
            file.add_bad(file.lines + 1, fault)
        if file.cut:  # an incomplete line: read again when the file has grown
            return True
        file.lines += line.endswith(b"\n")  # a line is counted when its newline is read
        file.end = stream.tell()
        file.tail = line[-_TAIL:]
        if time.monotonic() > deadline:
            return False
    return True
