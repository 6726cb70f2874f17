"""`restart_on_loss`: restarts a run on Ray that has lost a process or a node, or whose worker missed a deadline.

All groups are closed and opened again, and the run resumes from its own newest checkpoint as a new process would, with the
pending prompts that the checkpoint lists (see `rollout_source`): `prompts.jsonl` is that of a run that was killed and
resumed.

Invariant: at most `trainer.max_restarts` consecutive restarts without a new checkpoint, each after a longer pause. A failure
during the first start, and any error that is not a loss, ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol, TypeVar

from etude.errors import (
    EtudeError,
    InfrastructureError,
    MemoryExhausted,
    WorkerLost,
    describe_error,
    is_out_of_memory,
    one_line,
)
from etude.options import Options
from etude.run_folder import run_lock
from etude.trainer.checkpoints import Checkpoints
from etude.trainer.interrupts import LOSSES
from etude.trainer.worker_groups import WorkerGroups

logger = logging.getLogger(__name__)

_MAX_PAUSE_SECONDS = 60.0
_LOG_CHARACTERS = 1500  # max length of a logged loss: it includes the last log lines of the process
_MEMORY_ADVICE = (
    "smaller micro-batches (ppo_max_token_len_per_gpu) and model.enable_gradient_checkpointing need less; the same command "
    "resumes the run"
)


class Trainer(Protocol):
    """What `restart_on_loss` needs of a trainer."""

    run_dir: Path
    checkpoints: Checkpoints
    groups: WorkerGroups

    @property
    def options(self) -> Options:
        """Options of the run."""


Opened = TypeVar("Opened", bound=Trainer)
Result = TypeVar("Result")


def restart_on_loss(open_trainer: Callable[[bool, Path | None], Opened], run: Callable[[Opened], Result]) -> Result:
    """Calls `run` with a trainer, and with a new one after each loss.

    Args:
        open_trainer: takes whether this is a restart, and the checkpoint to resume from (None: as configured).

    Raises:
        WorkerLost, LostSamplesError: the last loss, after too many restarts.
        MemoryExhausted: out of memory, on host or device, in any process; one line.
        Exception: any other error of the run.
    """
    trainer = open_trainer(False, None)
    restarts = Restarts(trainer.options.trainer.max_restarts)
    with ExitStack() as lock:
        with trainer.groups.closed_on_error():
            lock.enter_context(run_lock(trainer.run_dir))
        while True:
            try:
                with closing(trainer.groups):
                    return run(trainer)
            except LOSSES as error:
                restarts.note(error, trainer.checkpoints.newest)
            except Exception as error:
                if is_out_of_memory(error):
                    raise MemoryExhausted(f"out of memory: {describe_error(error)}; {_MEMORY_ADVICE}") from error
                raise
            del trainer  # frees its rows and groups before the next one is opened
            while True:
                try:
                    trainer = open_trainer(True, restarts.newest)
                    break
                except InfrastructureError as error:
                    restarts.note(error)
                except EtudeError as error:
                    why = f"the workers cannot start again: {one_line(error, _LOG_CHARACTERS)}"
                    raise WorkerLost(f"{restarts.last}; {why}; the same command resumes the run") from error


class Restarts:
    """Counts restarts: at most `most` in a row without a new checkpoint. `newest`: the run's own last checkpoint; `last`:
    what the last loss says."""

    def __init__(self, most: int) -> None:
        self._most, self._done = most, 0
        self.newest: Path | None = None
        self.last = ""

    def note(self, error: Exception, newest: Path | None = None) -> None:
        """Logs a loss and sleeps, with exponential backoff.

        Raises:
            Exception: `error`, after too many restarts.
        """
        if newest is not None and newest != self.newest:
            self.newest, self._done = newest, 0
        self.last = str(error)  # the exception itself would keep the old trainer alive
        if self._done >= self._most:
            raise error
        pause = min(_MAX_PAUSE_SECONDS, 2.0**self._done)
        self._done += 1
        logger.warning(
            "%s; the workers start again in %g s from %s (trainer.max_restarts: %d of %d)",
            one_line(error, _LOG_CHARACTERS),
            pause,
            self.newest or "where the run began",
            self._done,
            self._most,
        )
        time.sleep(pause)
