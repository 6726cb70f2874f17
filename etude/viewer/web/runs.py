"""The runs that the web viewer serves, each with a cache of its files.

Invariant: a run is named by its path relative to the viewer's root folder, and found by lookup only. Files are tailed:
nothing is read twice, unless the file was replaced.
"""

from __future__ import annotations

import json
import os
import threading
import time
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from etude.errors import DataError
from etude.run_folder import METRICS_FILE, read_config
from etude.viewer.index import RolloutIndex
from etude.viewer.runs import find_runs

_FIND_SECONDS = 10.0  # between two scans of the root folder
_MAX_RUNS = 500
_MAX_METRICS_LINE = 4 * 2**20
_REFRESH_SECONDS = 2.0  # spent on reading dumps per request; the next request continues
_MAX_TOKENIZER_BYTES = 128 * 2**20


class RunView:
    """One run: the `index` of its dumps, and its metrics. `lock` guards both caches."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.lock = threading.Lock()
        self._index: RolloutIndex | None = None
        self._steps: dict[int, dict[str, Any]] = {}
        self._seen = (0, 0)  # inode of `metrics.jsonl`, and offset read up to

    @property
    def index(self) -> RolloutIndex:
        """The index of its trajectories, refreshed for up to `_REFRESH_SECONDS`."""
        with self.lock:
            index = self._index = self._index or RolloutIndex(self.folder)
        index.refresh(_REFRESH_SECONDS)
        return index

    def metrics(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns (version, records sorted by step); the version changes with the file."""
        with self.lock:
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
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                self._steps[record["step"]] = self._steps.get(record["step"], {}) | record
        self._seen = status.st_ino, end

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of a checkpoint, else of the configured model if that is a local folder; else None.

        Has only `decode(ids)`; loaded with the `tokenizers` library alone, without Transformers.
        """
        folders = sorted(self.folder.glob("global_step_*/actor/huggingface"))[:1]
        try:
            model = read_config(self.folder)["actor_rollout_ref"]["model"]
            folders += [Path(str(model.get("tokenizer_path") or model["path"]))]
        except (DataError, KeyError, TypeError, AttributeError):
            pass
        for folder in folders:
            path = folder / "tokenizer.json"
            if path.is_file() and path.stat().st_size <= _MAX_TOKENIZER_BYTES:
                from tokenizers import Tokenizer

                return _Decoder(Tokenizer.from_file(str(path)))
        return None


class _Decoder:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


class Runs:
    """The runs in `root`, including itself; if there are none, `root` is shown for its dumps.

    Raises:
        DataError: `root` does not exist.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._known, self._found_at = root, dict[str, RunView](), -_FIND_SECONDS
        self._lock = threading.Lock()
        if not root.exists():
            raise DataError(f"{root}: no such file or folder; name a run's folder, a folder of runs, or rollout dumps")

    def all(self) -> list[RunView]:
        """Returns all runs in the order of their names; rescans `root` at most every `_FIND_SECONDS`."""
        with self._lock:
            if time.monotonic() - self._found_at >= _FIND_SECONDS:
                folders = [*find_runs(self._root)][:_MAX_RUNS] or [self._root]
                names = [folder.relative_to(self._root).as_posix() for folder in folders]
                self._known = {
                    name: self._known.get(name) or RunView(name, folder) for name, folder in zip(names, folders)
                }
                self._found_at = time.monotonic()
            return list(self._known.values())

    def get(self, name: str) -> RunView | None:
        """Returns the run called `name`, or the first one if `name` is empty; None if unknown."""
        known = {run.name: run for run in self.all()}
        return known.get(name) if name else next(iter(known.values()))
