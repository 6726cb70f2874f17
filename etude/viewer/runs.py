"""Finds run folders, reads the status of each run, and compares configurations.

Invariant: only reads files, and tolerates any content; the directory walk and the bytes read per file are bounded. Reading
a run never changes it and never blocks another process from writing to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from etude.errors import DataError
from etude.options.validate import flatten
from etude.run_folder import COMPLETED, CONFIG_FILE, METRICS_FILE, RUN_FILE, is_locked, read_run_record
from etude.viewer.panel import REWARD_KEYS, is_number, is_validation

MAX_DEPTH = 6
MAX_FOLDERS = 20_000
_TAIL_BYTES = 2**18
_NOT_RUNS = ("rollouts", "validation", "tensorboard", "huggingface", "wandb", "mlruns", "data", "model")

Status: TypeAlias = Literal["running", "ended", "failed", "killed", "unknown"]


@dataclass(frozen=True)
class Run:
    """Status of a run. `ended`: completed; `failed`: stopped with an error or a signal (`why`); `killed`: died without
    recording an end; `unknown`: no `run.json`. `step` and `reward` are from the last training step, `validation` holds the
    last validation's mean per data source."""

    folder: Path
    status: Status
    why: str = ""
    step: int = 0
    total_steps: int | None = None
    reward: float | None = None
    validation: Mapping[str, float] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`train`, `sft` or `eval`; empty if unknown."""
        return str(self.record.get("kind") or "")[:20]

    @property
    def model(self) -> str:
        """The initial or evaluated model: a folder, a hub name or the name requested from a server; empty if unknown."""
        return str(self.record.get("model") or "")[:200]

    @property
    def started(self) -> datetime | None:
        """Start time of the run, or of its last resumption."""
        try:
            return datetime.fromisoformat(str(self.record.get("started")))
        except ValueError:
            return None


def find_runs(folder: Path | str) -> Iterator[Path]:
    """Yields the run folders in `folder`, including itself, sorted by name. Skips symbolic links, dumps and checkpoints;
    descends at most `MAX_DEPTH` levels and stops after `MAX_FOLDERS` folders."""
    seen, waiting = 0, [(Path(folder), 0)]
    while waiting and seen < MAX_FOLDERS:
        place, depth = waiting.pop()
        seen += 1
        if is_run(place):
            yield place
        if depth < MAX_DEPTH:
            waiting += [(each, depth + 1) for each in reversed(_folders(place))]


def is_run(folder: Path) -> bool:
    """Whether `folder` belongs to a run: it has an Étude `run.json`, or both metrics and a configuration."""
    if (folder / RUN_FILE).is_file() and "ended" in read_run_record(folder):
        return True
    return all((folder / name).is_file() for name in (METRICS_FILE, CONFIG_FILE))


def _folders(place: Path) -> list[Path]:
    try:
        with os.scandir(place) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [
        place / name for name in sorted(names) if not name.startswith((".", "global_step_")) and name not in _NOT_RUNS
    ]


def read_run(folder: Path | str) -> Run:
    """Reads the status of the run in `folder`.

    Raises:
        DataError: it is not a run folder.
    """
    folder = Path(folder)
    if not is_run(folder):
        raise DataError(
            f"{folder} is no run's folder: it has no {RUN_FILE}, and not both {METRICS_FILE} and {CONFIG_FILE}"
        )
    record, last = read_run_record(folder), _last_metrics(folder / METRICS_FILE)
    status, why = _status(folder, record)
    total = record.get("total_steps")
    reward = next((last[key] for key in REWARD_KEYS if is_number(last.get(key))), None)
    validation = {name: value for name, value in last.items() if is_validation(name) and is_number(value)}
    return Run(
        folder,
        status,
        why,
        last.get("step", 0),
        total if isinstance(total, int) and total > 0 else None,
        reward,
        validation,
        record,
    )


def _status(folder: Path, record: Mapping[str, Any]) -> tuple[Status, str]:
    ended = record.get("ended")
    if is_locked(folder):
        return "running", ""
    if not record:
        return "unknown", ""
    if ended is None:
        return "killed", "it left no word: it was killed, or its machine stopped"
    return ("ended", "") if ended == COMPLETED else ("failed", str(ended)[:300])


def _last_metrics(path: Path) -> dict[str, Any]:
    """Merges the metrics records at the end of the file: the newest value of each name, and the last `step`."""
    last: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL_BYTES, 0))
            lines = file.read(_TAIL_BYTES).splitlines()[1 if size > _TAIL_BYTES else 0 :]
    except OSError:
        return last
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            last |= record
    return last


@dataclass(frozen=True)
class Difference:
    """A key whose values differ; a side that lacks it has `MISSING`."""

    key: str
    left: Any
    right: Any


MISSING = "(none)"


def diff_configs(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Difference]:
    """Returns the keys in which two configurations differ, in the order of `right`, then those only in `left`."""
    before, after = dict(flatten(left)), dict(flatten(right))
    pairs = [(key, before.get(key, MISSING), after.get(key, MISSING)) for key in dict.fromkeys([*after, *before])]
    return [Difference(*each) for each in pairs if each[1] != each[2]]
