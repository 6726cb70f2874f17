"""Checkpoints that are whole or absent.

A checkpoint is the folder `global_step_N`: the roles' own files, and `trainer.json` with the loop's state. It is written
under a temporary name and renamed when complete; only then does `latest_checkpointed_iteration.txt` name it. Whatever
interrupts the writing, the previous checkpoint stays usable.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError, one_line

LATEST = "latest_checkpointed_iteration.txt"
_STATE = "trainer.json"
_TEMPORARY = ".incomplete-"


class Checkpoints:
    """The checkpoints in `folder`; `keep` newest are kept (None: all)."""

    def __init__(self, folder: Path | str, keep: int | None) -> None:
        self.folder, self._keep = Path(folder), keep

    def save(self, step: int, state: dict[str, Any], write: Callable[[str], None]) -> Path:
        """Writes the checkpoint of `step`; `write(folder)` adds the roles' files.

        Raises:
            CheckpointError: it could not be written, for instance because the disk is full; nothing half-written stays.
        """
        target = self.folder / f"global_step_{step}"
        temporary = self.folder / f"{_TEMPORARY}{target.name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(f"{_TEMPORARY}*"):  # of a run that was killed while it wrote
                shutil.rmtree(left)
            temporary.mkdir()
            write(str(temporary))
            (temporary / _STATE).write_text(json.dumps({"step": step, **state}, indent=1))
            _sync(temporary)
            if target.exists():
                shutil.rmtree(target)
            os.replace(temporary, target)
            self._name_latest(step)
            self._prune(step)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, (OSError, RuntimeError)) or "SafetensorError" in type(error).__name__:
                raise CheckpointError(
                    f"cannot write the checkpoint {target}: {one_line(error)}; free space or set trainer.default_local_dir"
                ) from error
            raise
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
        temporary = pointer.with_name(f"{_TEMPORARY}latest.txt")
        temporary.write_text(str(step))
        os.replace(temporary, pointer)

    def _prune(self, newest: int) -> None:
        if self._keep is None:
            return
        steps = sorted(int(p.name.removeprefix("global_step_")) for p in self.folder.glob("global_step_*"))
        for step in [s for s in steps if s <= newest][: -max(self._keep, 1)]:
            shutil.rmtree(self.folder / f"global_step_{step}")


def _sync(folder: Path) -> None:
    """Flushes the files to the disk, so that a rename never precedes their contents."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
