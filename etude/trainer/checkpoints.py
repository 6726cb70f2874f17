"""Atomic checkpoints: complete or absent.

A checkpoint is the folder `global_step_N`: the roles' own files, and `trainer.json` with the loop's state. It is written
under a temporary name and renamed when complete; only then does `latest_checkpointed_iteration.txt` name it. If writing is
interrupted, the previous checkpoint stays usable. At most one is written at a time, optionally in a background thread.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError, one_line
from etude.run_folder import LATEST, list_checkpoints
from etude.scratch import INCOMPLETE, backup_path, free_path, remove_path, sync_path, write_whole

logger = logging.getLogger(__name__)

_STATE = "trainer.json"


class Checkpoints:
    """The checkpoints in `folder`; only the `keep` newest are kept (None or -1: all)."""

    def __init__(self, folder: Path | str, keep: int | None, *, in_background: bool = False) -> None:
        self.folder, self._keep = Path(folder), None if keep == -1 else keep
        self._writer = ThreadPoolExecutor(1, "etude-checkpoint") if in_background else None
        self.newest: Path | None = None  # the newest one written by this object
        self._running: Future[None] | None = None

    def save(
        self, step: int, state: dict[str, Any], write: Callable[[str], None], copy: Callable[[], None] = lambda: None
    ) -> None:
        """Writes the checkpoint of `step`, after any earlier save has finished; `write(folder)` adds the roles' files. For a
        background save, `copy()` first takes a snapshot of what `write` will save.

        Raises:
            CheckpointError: this or an earlier checkpoint could not be written, for instance because the disk is full; no
                partial files are left.
        """
        self.wait()
        text = json.dumps({"step": step, **state}, indent=1)
        if self._writer is None:
            self._write(step, text, write)
        else:
            copy()
            self._running = self._writer.submit(self._write, step, text, write)  # the interpreter waits for it at exit

    def wait(self, *, only_if_done: bool = False) -> None:
        """Waits for a running background save. `only_if_done`: does not wait, only raises the error of one that failed.

        Raises:
            CheckpointError: the save failed.
        """
        if self._running is not None and (self._running.done() or not only_if_done):
            running, self._running = self._running, None
            running.result()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Waits, when the block ends, for a running save. If the block raises, an error of the save is only logged."""
        try:
            yield
        except BaseException:
            try:
                self.wait()
            except Exception as second:  # must not hide the original error
                logger.warning("%s", one_line(second))
            raise
        self.wait()

    def _write(self, step: int, state: str, write: Callable[[str], None]) -> None:
        target = self.folder / f"global_step_{step}"
        with write_whole(target) as temporary:
            write(str(temporary))
            (temporary / _STATE).write_text(state)
        try:
            self._point_to(step)
            self.newest = target
            self._prune(step)
        except OSError as error:
            raise CheckpointError(
                f"{target} is complete, but {self.folder} cannot be tidied: {one_line(error)}"
            ) from error

    def _point_to(self, step: int) -> None:
        temporary = self.folder / f"{INCOMPLETE}{LATEST}"
        temporary.write_text(str(step))
        sync_path(temporary)
        os.replace(temporary, self.folder / LATEST)
        sync_path(self.folder)

    def set_aside_later(self, resumed: Path | None) -> str | None:
        """Moves what an earlier run saved after the checkpoint `resumed` (None: all) to a new folder, `checkpoints.1` …,
        since a run that is killed before it saves would resume from that. Returns a line that says so; None if there is
        nothing.

        Raises:
            CheckpointError: a file cannot be moved.
        """
        pointer, step = self.folder / LATEST, -1
        if resumed is not None and self.holds(resumed):
            step = self.read_state(resumed)["step"]
        later = [f"global_step_{each}" for each in list_checkpoints(self.folder) if each > step]
        if not later or (pointer.is_file() and pointer.read_text().strip() == str(step)):  # a save without its pointer
            return None
        aside = free_path(self.folder / "checkpoints")
        try:
            aside.mkdir()
            if pointer.is_file():
                shutil.copyfile(pointer, aside / LATEST)
                pointer.unlink()
            if step >= 0:
                self._point_to(step)
            for name in later:
                (self.folder / name).rename(aside / name)
        except OSError as error:
            raise CheckpointError(
                f"cannot move checkpoints of an earlier run from {self.folder} to {aside}: {one_line(error)}"
            ) from error
        return f"{', '.join(later)} of an earlier run: now in {aside}, yours to remove"

    def holds(self, checkpoint: Path) -> bool:
        """Whether `checkpoint` is one of this run's, and not of another folder."""
        return checkpoint.parent.resolve() == self.folder.resolve()

    def latest(self) -> Path | None:
        """Returns the newest complete checkpoint, or None.

        Raises:
            CheckpointError: `latest_checkpointed_iteration.txt` does not name a checkpoint.
        """
        pointer = self.folder / LATEST
        if not pointer.is_file():
            return None
        text = pointer.read_text().strip()
        target = self.folder / f"global_step_{text}"
        backup = backup_path(target)
        if backup.exists() and not target.exists():  # killed while replacing this checkpoint
            os.replace(backup, target)
        if not text.isdigit() or not (target / _STATE).is_file():
            raise CheckpointError(
                f"{pointer} names step '{text}', but {target} is no checkpoint; correct or remove the file"
            )
        return target

    @staticmethod
    def read_state(folder: Path | str) -> dict[str, Any]:
        """Reads the loop's state from a checkpoint.

        Raises:
            CheckpointError: the folder is not a checkpoint, or its state cannot be read.
        """
        path = Path(folder) / _STATE
        try:
            state = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} is no checkpoint: cannot read {path.name}: {one_line(error)}") from error
        if not isinstance(state, dict) or not isinstance(state.get("step"), int):
            raise CheckpointError(f"{path} holds no step number")
        return state

    def _prune(self, newest: int) -> None:
        """Removes all but the newest checkpoints, and partial ones left by killed runs."""
        for left in self.folder.glob(f"{INCOMPLETE}*"):
            remove_path(left)
        if self._keep is None:
            return
        numbers = [path.name.removeprefix("global_step_") for path in self.folder.glob("global_step_*")]
        steps = sorted(int(number) for number in numbers if number.isdecimal() and int(number) <= newest)
        for step in steps[: -max(self._keep, 1)]:
            shutil.rmtree(self.folder / f"global_step_{step}")
