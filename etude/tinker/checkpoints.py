"""Checkpoints as folders, under the names that clients know: `tinker://RUN/weights/NAME` and `…/sampler_weights/NAME`.

Invariant: a checkpoint is complete or absent, and once its client has heard its path, it survives the server. A name never
leads out of the server's folder. Each is a folder that peft loads; one of `weights` also has the optimizer's moments.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError, DataError, one_line
from etude.jsonl import write_json
from etude.run_folder import utc_now
from etude.scratch import INCOMPLETE, write_whole
from etude.tinker.adapters import AdapterShape

KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""The folder of a run's checkpoints, and what the SDK calls their type."""
_PART = re.compile(r"[\w-][\w.:-]{0,199}", re.ASCII)
_RUN, _ABOUT = "run.json", "checkpoint.json"


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is."""

    run: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @classmethod
    def of(cls, path: str) -> Place:
        """Reads a `tinker://` path; raises DataError if it is none."""
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
            raise DataError(f"'{path[:200]}' is not tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME")
        for part in parts:
            check_name(part)
        return cls(*parts)


def check_name(name: str) -> None:
    """Raises DataError unless `name` can name a run or a checkpoint."""
    if not _PART.fullmatch(name):
        raise DataError(f"'{name[:100]}' is not a name: up to 200 letters, digits, and any of _ - . : after the first")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint's `checkpoint.json` says, and where it is."""

    place: Place
    base_model: str
    shape: AdapterShape
    time: str
    expires_at: str | None
    user_metadata: Mapping[str, str] | None
    size_bytes: int

    def record(self) -> dict[str, Any]:
        """The SDK's `Checkpoint`."""
        return {
            "checkpoint_id": f"{self.place.kind}/{self.place.name}",
            "checkpoint_type": KINDS[self.place.kind],
            "time": self.time,
            "tinker_path": str(self.place),
            "size_bytes": self.size_bytes,
            "user_metadata": self.user_metadata,
            "expires_at": self.expires_at,
        }


class CheckpointStore:
    """The runs and checkpoints in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, place: Place) -> Path:
        """The folder of a checkpoint."""
        return self._folder / place.run / place.kind / place.name

    def add_run(self, run: str, base_model: str, shape: AdapterShape, user_metadata: Mapping[str, Any] | None) -> None:
        """Records a run, whose checkpoints may follow."""
        (self._folder / run).mkdir(parents=True, exist_ok=True)
        about = {"base_model": base_model, "shape": asdict(shape), "user_metadata": user_metadata, "time": utc_now()}
        write_json(self._folder / run / _RUN, about)

    @contextmanager
    def write(
        self,
        place: Place,
        base_model: str,
        shape: AdapterShape,
        *,
        overwrite: bool,
        ttl_seconds: int | None,
        user_metadata: Mapping[str, str] | None,
    ) -> Iterator[Path]:
        """Yields the folder to write the weights into; the checkpoint is there once the block has ended.

        Raises:
            DataError: the name is taken.
            CheckpointError: it cannot be written.
        """
        if not overwrite and self.path(place).exists():
            raise DataError(f"{place} exists: save with overwrite=True, or under another name")
        self.path(place).parent.mkdir(parents=True, exist_ok=True)
        now = datetime.now(timezone.utc)
        expires = None if ttl_seconds is None else (now + timedelta(seconds=ttl_seconds)).isoformat()
        with write_whole(self.path(place), "free space, or start the server with another --checkpoints") as folder:
            yield folder
            about = {"base_model": base_model, "shape": asdict(shape), "time": now.isoformat(), "expires_at": expires}
            write_json(folder / _ABOUT, {**about, "user_metadata": user_metadata})

    def read(self, path: str) -> Checkpoint:
        """The checkpoint at a `tinker://` path; raises DataError if there is none, CheckpointError if it is broken."""
        found = self._read(Place.of(path))
        if found is None:
            raise DataError(f"{path}: there is no such checkpoint on this server")
        return found

    def _read(self, place: Place) -> Checkpoint | None:
        folder = self.path(place)
        try:
            about = json.loads((folder / _ABOUT).read_bytes())
            size = sum(file.stat().st_size for file in folder.iterdir())
            shape = AdapterShape(**about.pop("shape"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{folder}: {one_line(error)}") from error
        found = Checkpoint(place=place, shape=shape, size_bytes=size, **about)
        if found.expires_at is not None and datetime.fromisoformat(found.expires_at) < datetime.now(timezone.utc):
            self.remove(place)
            return None
        return found

    def remove(self, place: Place) -> None:
        """Removes a checkpoint, if it is there."""
        shutil.rmtree(self.path(place), ignore_errors=True)

    def of_run(self, run: str) -> list[Checkpoint]:
        """A run's checkpoints, the oldest first; raises DataError for a name that is none."""
        check_name(run)
        names = [
            Place(run, kind, path.name)
            for kind in KINDS
            for path in (self._folder / run / kind).glob("*")
            if not path.name.startswith(INCOMPLETE)
        ]
        found = [self._read(place) for place in names]
        return sorted((each for each in found if each is not None), key=lambda each: each.time)

    def runs(self) -> list[str]:
        """All runs, the newest first."""
        files = sorted(self._folder.glob(f"*/{_RUN}"), key=lambda file: file.stat().st_mtime, reverse=True)
        return [file.parent.name for file in files]

    def run_record(self, run: str) -> dict[str, Any]:
        """The SDK's `TrainingRun`; raises DataError if there is no such run."""
        check_name(run)
        try:
            about = json.loads((self._folder / run / _RUN).read_bytes())
        except (OSError, ValueError):
            raise DataError(f"there is no training run '{run}' on this server") from None
        saved = self.of_run(run)
        last = {each.place.kind: each.record() for each in saved}
        return {
            "training_run_id": run,
            "base_model": about["base_model"],
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": about["shape"]["rank"],
            "last_request_time": max([about["time"], *(each.time for each in saved)]),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": about["user_metadata"],
        }
