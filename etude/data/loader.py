"""`ResumableLoader`: batches of rows in an order that a checkpoint can resume exactly.

Invariant: the order of an epoch depends only on (seed, epoch, number of rows), or on the sampler's state, which is part
of the loader's state, so that an interrupted run sees the same batches as an uninterrupted one. A batch counts as
consumed from the moment it is yielded: save the state after the batch has been used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from etude.data.files import Row
from etude.data.samplers import ROW_COLUMN, Sampler
from etude.errors import ConfigError, DataError
from etude.seeds import epoch_order

if TYPE_CHECKING:
    from etude.protocol import DataProto


_OTHER = (
    "put the rows back, or set trainer.default_local_dir for a run of its own with these, or trainer.resume_mode=disable to "
    "start over in this folder"
)


class Rows(Protocol):
    """A dataset. If it has an attribute `fingerprints` (file → digest), resuming compares content, not only length."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, number: int, /) -> Row:
        """One row."""


class ResumableLoader:
    """Iterating yields the remaining batches of the current epoch, and then advances to the next epoch.

    `epoch` counts from 0 and `position` is the number of batches already yielded in it. `len()` is the number of batches
    per epoch; with `drop_last` a last batch smaller than `batch_size` is dropped. With a `sampler`, an epoch has the
    same number of batches, made of the rows that it draws, each with its dataset index in the column `dataset_row`.

    Raises:
        ConfigError: `batch_size` or `seed` is invalid.
    """

    def __init__(
        self,
        dataset: Rows,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 1,
        drop_last: bool = True,
        sampler: Sampler | None = None,
    ) -> None:
        if batch_size < 1 or (drop_last and batch_size > len(dataset)):
            allowed = f"between 1 and {len(dataset)}, the number of rows"
            raise ConfigError(f"data.train_batch_size must be {allowed}, got {batch_size}")
        if seed < 0:
            raise ConfigError(f"data.seed must not be negative, got {seed}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.sampler = sampler
        self.epoch = 0
        self.position = 0
        self._ordered: tuple[int, np.ndarray] | None = None  # cached (epoch, order)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + int(rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[Row]]:
        epoch = self.epoch
        while self.epoch == epoch and self.position < len(self):
            batch = self.batch(self.number) if self.sampler is None else self._draw(self.sampler)
            self.position += 1
            if self.position == len(self):
                self.epoch, self.position = epoch + 1, 0
            yield batch

    @property
    def number(self) -> int:
        """Number of batches yielded since the start of the first epoch."""
        return self.epoch * len(self) + self.position

    def batch(self, number: int) -> list[Row]:
        """Returns the batch with index `number` over all epochs; a sampler is not used."""
        epoch, position = divmod(number, len(self))
        start = position * self.batch_size
        return [self.dataset[int(row)] for row in self.order(epoch)[start : start + self.batch_size]]

    def _draw(self, sampler: Sampler) -> list[Row]:
        numbers = [int(number) for number in sampler.draw(self.batch_size)]
        if len(numbers) != self.batch_size or not all(0 <= number < len(self.dataset) for number in numbers):
            name, rows = type(sampler).__name__, len(self.dataset)
            raise ConfigError(f"data.sampler: {name} drew {numbers}, not {self.batch_size} of the {rows} rows")
        return [self.numbered_row(number) for number in numbers]

    def numbered_row(self, number: int) -> Row:
        """Returns a row of the dataset with its index in the column `dataset_row`, as in a sampler's batch."""
        return {**self.dataset[number], ROW_COLUMN: number}

    def update(self, batch: DataProto) -> None:
        """Passes a scored batch of rollouts to the sampler, if there is one and the batch is not empty."""
        if self.sampler is not None and len(batch):  # an empty batch may lack the columns
            self.sampler.update(batch)

    def cycle(self) -> Iterator[list[Row]]:
        """Yields batches endlessly, epoch after epoch."""
        while True:
            yield from self

    def order(self, epoch: int) -> np.ndarray:
        """Returns the row indices in the order of `epoch`: (rows,) int64."""
        if self._ordered is None or self._ordered[0] != epoch:
            rows = len(self.dataset)
            self._ordered = epoch, epoch_order(self.seed, epoch, rows) if self.shuffle else np.arange(rows)
        return self._ordered[1]

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, the sampler's state, and the settings that the order depends on."""
        drawn = {} if self.sampler is None else {"sampler": self.sampler.state_dict()}
        return {"epoch": self.epoch, "position": self.position, **drawn} | self._settings()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from `state`.

        Raises:
            ConfigError: a setting that the order depends on differs; names its key.
            DataError: the dataset differs from the one of the state.
        """
        for key, now in self._settings().items():
            if key.startswith("data.") and state.get(key) != now:
                raise ConfigError(f"{key} is {now} but the checkpoint was made with {state.get(key)}: it cannot change")
        files = ", ".join(changed_files(state.get("fingerprints"), getattr(self.dataset, "fingerprints", {})))
        if (then := state.get("rows")) != (now := len(self.dataset)):
            named = f": {files}" if files else ""
            raise DataError(
                f"data.train_files: the number of rows was {then} at the checkpoint and is {now} now{named}", fix=_OTHER
            )
        if files:
            line = f"data.train_files: rows (prompts, ground truths, …) changed since the checkpoint: {files}"
            raise DataError(line, fix=_OTHER)
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position < len(self):
            raise DataError(f"data.train_files: the checkpoint stands at batch {position} of {len(self)} an epoch")
        self.epoch, self.position = epoch, position
        if self.sampler is not None:
            self.sampler.load_state_dict(state["sampler"])

    def _settings(self) -> dict[str, Any]:
        return {
            "data.train_batch_size": self.batch_size,
            "data.shuffle": self.shuffle,
            "data.seed": self.seed,
            "rows": len(self.dataset),
            "fingerprints": dict(getattr(self.dataset, "fingerprints", {})),
        }


def changed_files(then: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """Returns the files of `now` whose digest differs from that of the file at the same place in `then`, as files may have
    moved, and the files of `then` beyond them; none if `then` is unknown."""
    if then is None:
        return []
    pairs = zip_longest(then.items(), now.items(), fillvalue=(None, None))
    return [str(new or old) for (old, before), (new, after) in pairs if before != after]
