"""Finds run folders, reads the status and the files of each run, and compares configurations.

Invariant: only reads files, and tolerates any content; the directory walk and the bytes read per file are bounded. Reading
a run never changes it and never blocks another process from writing to it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from etude.errors import DataError
from etude.options.validate import flatten
from etude.run_folder import (
    COMPLETED,
    CONFIG_FILE,
    LATEST,
    METRICS_FILE,
    RUN_FILE,
    STOPPED,
    is_locked,
    metrics_of,
    read_run_record,
    run_totals,
    unit_costs,
)
from etude.viewer.curves import REWARD_KEYS, is_validation, validation_label
from etude.viewer.index import RolloutIndex, config_of
from etude.viewer.rows import as_dict, is_number

MAX_DEPTH = 6
MAX_FOLDERS = 20_000
_TAIL_BYTES = 2**18
_FIND_SECONDS = 10.0  # between two scans of the root folder
_MAX_RUNS = 500
_MAX_METRICS_LINE = 4 * 2**20
_REFRESH_SECONDS = 2.0  # spent on reading dumps per request; the next request continues
_MAX_TOKENIZER_BYTES = 128 * 2**20
_VALIDATED, _MISSING = "val-core/", "/reward/missing"
_NOT_RUNS = ("rollouts", "validation", "tensorboard", "huggingface", "wandb", "mlruns", "data", "model")

Status: TypeAlias = Literal["running", "ended", "stopped", "failed", "killed", "unknown"]
Decode: TypeAlias = Callable[[list[int]], str]


@dataclass(frozen=True)
class Run:
    """Status of a run. `ended`: completed; `stopped` by a signal, or `failed` with an error (`why`); `killed`: died without
    recording an end; `unknown`: no `run.json`. `step` is the last training step (without `metrics.jsonl` that of the newest
    checkpoint), `reward` its reward, `validation` holds the last validation's mean per data source, `missing` how many of
    its answers were dropped."""

    folder: Path
    status: Status
    why: str = ""
    step: int = 0
    total_steps: int | None = None
    reward: float | None = None
    validation: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, float] = field(default_factory=dict)
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
    def branch(self) -> str:
        """The run and the step that this one branched from; empty if it is no branch."""
        parent = self.record.get("parent")
        if not isinstance(parent, Mapping):
            return ""
        return f"{str(parent.get('run'))[-200:]}, step {parent.get('step')}"

    @property
    def started(self) -> datetime | None:
        """When the run first started."""
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
    missing = {name: value for name, value in last.items() if name.endswith(_MISSING) and is_number(value)}
    return Run(
        folder,
        status,
        why,
        last["step"] if last else _last_checkpoint(folder),
        total if isinstance(total, int) and total > 0 else None,
        reward,
        validation,
        {validation_label(name): value for name, value in missing.items()},
        record,
    )


def _status(folder: Path, record: Mapping[str, Any]) -> tuple[Status, str]:
    ended = record.get("ended")
    if is_locked(folder, elsewhere=ended is not None):  # it has ended when its own process writes the report
        return "running", ""
    if not record:
        return "unknown", ""
    if ended is None:
        return "killed", "it left no word: it was killed, or its machine stopped"
    if ended == COMPLETED:
        return "ended", ""
    return "stopped" if str(ended).startswith(STOPPED) else "failed", str(ended)[:300]


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
        if (record := _parse_metrics(line)) is not None:
            if any(name.startswith(_VALIDATED) for name in record):  # one with other val_kwargs has other names
                last = {name: value for name, value in last.items() if not name.startswith(_VALIDATED)}
            last |= record
    return last


def _last_checkpoint(folder: Path) -> int:
    """The step of a run whose `trainer.logger` kept no metrics: that of its newest checkpoint."""
    try:
        return int((folder / LATEST).read_text()[:20])
    except (OSError, ValueError):
        return 0


def _parse_metrics(line: bytes) -> dict[str, Any] | None:
    """The record of a step; None if the line is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def told_validation(run: Run) -> str:
    """The run's last validation: each data source with its mean@N, how answers were decoded, if that is known, and how many
    were dropped."""
    config = dict(flatten(config_of(run.folder)))
    val = "actor_rollout_ref.rollout.val_kwargs"
    sampled, temperature = (config.get(f"{val}.{name}") for name in ("do_sample", "temperature"))
    how = "" if sampled is None else " (sampled)" if sampled and temperature else " (greedy)"
    means = (f"{validation_label(n)} {n.rpartition('/')[2]} {value:.4g}" for n, value in run.validation.items())
    lost = (f"{count:,.0f} answers of {source} dropped" for source, count in run.missing.items())
    return ", ".join((*means, *lost)) + how


def cost_facts(records: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> dict[str, str]:
    """Formats what a run with these metrics and this `run.json` has cost: `totals`, `per step`, and `per point of success`;
    see `unit_costs`."""
    totals = run_totals(records)
    del totals["steps"]
    named = {"totals": totals} | {f"per {unit}": costs for unit, costs in unit_costs(records, record).items()}
    return {name: _format_costs(costs) for name, costs in named.items() if costs}


def brief_cost(run: Run) -> str:
    """Formats the GPU hours of a run, else its CPU hours, and what its judges cost."""
    totals = run.record.get("totals")
    if not isinstance(totals, Mapping):
        totals = run_totals(metrics_of(run.folder))
    hours = "gpu_hours" if totals.get("gpu_hours") else "cpu_hours"
    return _format_costs({name: totals[name] for name in (hours, "judge_cost") if is_number(totals.get(name))})


def _format_costs(costs: Mapping[str, float]) -> str:
    told = ", ".join(f"{v:,.0f} {name}" if v >= 1000 else f"{v:.4g} {name}" for name, v in costs.items())
    return told.replace("_", " ").replace("cpu", "CPU").replace("gpu", "GPU")


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


# -- runs to show --------------------------------------------------------------------------------------------------------


class RunView:
    """One run as the pages show it: the `index` of its dumps, and its metrics; both are tailed, so that nothing is read
    twice unless its file was replaced. `named` and `ends`: see `RolloutIndex`."""

    def __init__(
        self, name: str, folder: Path, title: str = "", named: Mapping[str, Path] | None = None, *, ends: bool = False
    ) -> None:
        self.name, self.folder = name, folder
        self.title = title or (name if name not in ("", ".") else folder.resolve().name)
        self._lock = threading.Lock()
        self._new_index = lambda: RolloutIndex(folder, named, ends=ends)
        self._index: RolloutIndex | None = None
        self._steps: dict[int, dict[str, Any]] = {}
        self._seen = (0, 0)  # inode of `metrics.jsonl`, and offset read up to

    @property
    def index(self) -> RolloutIndex:
        """The index of its trajectories, refreshed for up to `_REFRESH_SECONDS`."""
        with self._lock:
            index = self._index = self._index or self._new_index()
        index.refresh(_REFRESH_SECONDS)
        return index

    def metrics(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns (version, records sorted by step); the version changes with the file."""
        with self._lock:
            try:
                with (self.folder / METRICS_FILE).open("rb") as file:
                    self._follow(file)
            except OSError:
                self._seen, self._steps = (0, 0), {}
            return f"{self._seen[0]}-{self._seen[1]}", [self._steps[step] for step in sorted(self._steps)]

    def _follow(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        inode, end = self._seen
        if status.st_ino != inode or status.st_size < end:
            self._steps, end = {}, 0
        file.seek(end)
        while (line := file.readline(_MAX_METRICS_LINE)).endswith(b"\n"):
            end += len(line)
            if (record := _parse_metrics(line)) is not None:
                self._steps[record["step"]] = self._steps.get(record["step"], {}) | record
        self._seen = status.st_ino, end

    @cached_property
    def decode(self) -> Decode | None:
        """Decodes token ids; see `find_decoder`."""
        return find_decoder(self.folder)


def find_decoder(folder: Path) -> Decode | None:
    """Returns the decoding function of a checkpoint's tokenizer, else of the configured model's if that is a local folder;
    None if neither has a readable one. Loaded with the `tokenizers` library alone, without Transformers."""
    folders = sorted(folder.glob("global_step_*/actor/huggingface"))[:1]
    model = as_dict(as_dict(config_of(folder).get("actor_rollout_ref")).get("model"))
    folders += [Path(str(model[key])) for key in ("tokenizer_path", "path") if model.get(key)][:1]
    for path in (each / "tokenizer.json" for each in folders):
        if path.is_file() and path.stat().st_size <= _MAX_TOKENIZER_BYTES:
            from tokenizers import Tokenizer

            try:
                tokenizer = Tokenizer.from_file(str(path))
            except Exception:  # tokenizers raises plain Exception for a malformed file
                return None
            return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    return None


class Runs:
    """The runs in `root`, including itself; if there are none, `root` is shown for its dumps. A run is named by its path
    relative to `root`, and found by lookup only.

    Raises:
        DataError: `root` does not exist.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._known, self._found_at = root, dict[str, RunView](), -_FIND_SECONDS
        self._lock = threading.Lock()
        if not root.exists():
            raise DataError(f"{root}: no such file or folder; name a run's folder, a folder of runs, or rollout dumps")

    def all(self) -> list[RunView]:
        """Returns all runs: first the one to open, which is `root` itself, else one that is running, else the one that wrote
        last, and a quickstart's evaluations after them; then the others by name. Rescans `root` at most every
        `_FIND_SECONDS`."""
        with self._lock:
            if time.monotonic() - self._found_at >= _FIND_SECONDS:
                folders = [*islice(find_runs(self._root), _MAX_RUNS)] or [self._root]
                folders.sort(key=max(folders, key=self._interest).__ne__)
                named = {folder.relative_to(self._root).as_posix(): folder for folder in folders}
                self._known = {name: self._known.get(name) or RunView(name, each) for name, each in named.items()}
                self._found_at = time.monotonic()
            return list(self._known.values())

    def _interest(self, folder: Path) -> tuple[bool, bool, bool, float]:
        files = [path for path in (folder / RUN_FILE, folder / METRICS_FILE) if path.is_file()]
        trains = folder.parent.name != "evaluation"  # where `etude quickstart` has its own
        return (
            folder == self._root,
            trains,
            is_locked(folder),
            max((path.stat().st_mtime for path in files), default=0.0),
        )

    def get(self, name: str) -> RunView | None:
        """Returns the run called `name`, or the first one if `name` is empty; None if unknown."""
        known = {run.name: run for run in self.all()}
        return known.get(name) if name else next(iter(known.values()))
