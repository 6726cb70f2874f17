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
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError, one_line

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
_STATE = "trainer.json"
_TEMPORARY = ".incomplete-"


class Checkpoints:
    """The checkpoints in `folder`; only the `keep` newest are kept (None or -1: all)."""

    def __init__(self, folder: Path | str, keep: int | None, *, in_background: bool = False) -> None:
        self.folder, self._keep = Path(folder), None if keep == -1 else keep
        self._in_background = in_background
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
        if not self._in_background:
            self._write(step, text, write)
            return
        copy()
        running = self._running = Future()

        def run() -> None:
            try:
                self._write(step, text, write)
                running.set_result(None)
            except BaseException as error:
                running.set_exception(error)

        threading.Thread(
            target=run, name="etude-checkpoint"
        ).start()  # not a daemon: the interpreter waits for it at exit

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
            self._name_latest(step)
            self.newest = target
            self._prune(step)
        except OSError as error:
            raise CheckpointError(
                f"{target} is complete, but {self.folder} cannot be tidied: {one_line(error)}"
            ) from error

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
        backup = _backup_path(target)
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

    def _name_latest(self, step: int) -> None:
        pointer = self.folder / LATEST
        temporary = pointer.with_name(f"{_TEMPORARY}{LATEST}")
        temporary.write_text(str(step))
        _sync(temporary)
        os.replace(temporary, pointer)
        _sync(self.folder)

    def _prune(self, newest: int) -> None:
        """Removes all but the newest checkpoints, and partial ones left by killed runs."""
        for left in self.folder.glob(f"{_TEMPORARY}*"):
            _remove(left)
        if self._keep is None:
            return
        numbers = [path.name.removeprefix("global_step_") for path in self.folder.glob("global_step_*")]
        steps = sorted(int(number) for number in numbers if number.isdecimal() and int(number) <= newest)
        for step in steps[: -max(self._keep, 1)]:
            shutil.rmtree(self.folder / f"global_step_{step}")


@contextmanager
def write_whole(target: Path, advice: str = "free space or set trainer.default_local_dir") -> Iterator[Path]:
    """Yields a temporary folder that atomically replaces `target` if the block succeeds, and is removed otherwise.

    Raises:
        CheckpointError: the folder could not be written, for instance because the disk is full; an existing `target` stays
            intact.
    """
    temporary, backup = target.with_name(f"{_TEMPORARY}{target.name}"), _backup_path(target)
    try:
        for left in (temporary, backup):  # left by a run that was killed while writing
            _remove(left)
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)  # contents reach the disk before the rename
        if target.exists():
            os.replace(target, backup)
        os.replace(temporary, target)
        _sync(target.parent)
        shutil.rmtree(backup, ignore_errors=True)
    except BaseException as error:
        reason = f"{one_line(error).replace(f'{temporary}/', '')} ({_free(target.parent)} free)"
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, (OSError, CheckpointError)):
            raise CheckpointError(f"cannot write {target}: {reason}; {advice}") from error
        raise


def _backup_path(target: Path) -> Path:
    return target.with_name(f"{_TEMPORARY}replaced-{target.name}")


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB"
    except OSError:
        return "unknown space"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
