"""Checkpoints that are whole or absent.

A checkpoint is the folder `global_step_N`: the roles' own files, and `trainer.json` with the loop's state. It is written
under a temporary name and renamed when complete; only then does `latest_checkpointed_iteration.txt` name it. If writing is
interrupted, the previous checkpoint stays usable.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError, one_line

LATEST = "latest_checkpointed_iteration.txt"
_STATE = "trainer.json"
_TEMPORARY = ".incomplete-"


class Checkpoints:
    """The checkpoints in `folder`; `keep` newest are kept (None or -1: all)."""

    def __init__(self, folder: Path | str, keep: int | None) -> None:
        self.folder, self._keep = Path(folder), None if keep == -1 else keep

    def save(self, step: int, state: dict[str, Any], write: Callable[[str], None]) -> Path:
        """Writes the checkpoint of `step`; `write(folder)` adds the roles' files.

        Raises:
            CheckpointError: it could not be written, for instance because the disk is full; no partial files stay.
        """
        target = self.folder / f"global_step_{step}"
        with write_whole(target) as temporary:
            write(str(temporary))
            (temporary / _STATE).write_text(json.dumps({"step": step, **state}, indent=1))
        try:
            self._name_latest(step)
            self._prune(step)
        except OSError as error:
            raise CheckpointError(
                f"{target} is complete, but {self.folder} cannot be tidied: {one_line(error)}"
            ) from error
        return target

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        pointer = self.folder / LATEST
        if not pointer.is_file():
            return None
        text = pointer.read_text().strip()
        target = self.folder / f"global_step_{text}"
        if not text.isdigit() or not (target / _STATE).is_file():
            raise CheckpointError(
                f"{pointer} names step '{text}', but {target} is no checkpoint; correct or remove the file"
            )
        return target

    @staticmethod
    def read_state(folder: Path | str) -> dict[str, Any]:
        """The loop's state in a checkpoint.

        Raises:
            CheckpointError: the folder is no checkpoint, or its state cannot be read.
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
        """Removes all but the newest checkpoints, and partial ones of killed runs."""
        for left in self.folder.glob(f"{_TEMPORARY}*"):
            _remove(left)
        if self._keep is None:
            return
        numbers = [path.name.removeprefix("global_step_") for path in self.folder.glob("global_step_*")]
        steps = sorted(int(number) for number in numbers if number.isdecimal() and int(number) <= newest)
        for step in steps[: -max(self._keep, 1)]:
            shutil.rmtree(self.folder / f"global_step_{step}")


@contextmanager
def write_whole(target: Path) -> Iterator[Path]:
    """A new folder that replaces `target` when the block succeeds, and is removed otherwise.

    Raises:
        CheckpointError: it could not be written, for instance because the disk is full; an earlier `target` is intact.
    """
    temporary = target.with_name(f"{_TEMPORARY}{target.name}")
    replaced = target.with_name(f"{_TEMPORARY}replaced-{target.name}")
    try:
        for left in (temporary, replaced):  # of a run that was killed while it wrote
            _remove(left)
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)  # contents reach the disk before the rename
        if target.exists():
            os.replace(target, replaced)
        os.replace(temporary, target)
        _sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:
        reason = f"{one_line(error).replace(f'{temporary}/', '')} ({_free(target.parent)} free)"
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, (OSError, CheckpointError)):
            advice = "free space or set trainer.default_local_dir"
            raise CheckpointError(f"cannot write {target}: {reason}; {advice}") from error
        raise


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
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
