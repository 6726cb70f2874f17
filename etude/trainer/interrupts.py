"""Graceful shutdown on Ctrl-C, SIGTERM and SIGHUP.

The first signal stops the loop after the current step. A second one abandons that step, but only during a rollout, when no
state changes: it raises KeyboardInterrupt, which cancels the trajectories and releases their tools. A second signal during
an update waits for the update. Either way the loop saves, closes and raises `Interrupted`, so that the run is not mistaken
for a complete one; so does a run that loses a worker after a signal.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from etude.distributed.plane import LostSamplesError
from etude.errors import TrainingStopped, WorkerLost
from etude.run_folder import STOPPED
from etude.trainer.events import EventSink, Notice, ignore_event

LOSSES = (WorkerLost, LostSamplesError)
"""Errors after which a run can go on with new workers."""
_AGAIN_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(TrainingStopped):
    """A signal stopped the run cleanly; the exit status is that of a process killed by `signal_number`."""

    def __init__(self, text: str, signal_number: int) -> None:
        super().__init__(text)
        self.exit_status = 128 + signal_number


class Interrupts:
    """Context manager that handles the signals. `stop`: whether one has arrived; `signal_number`: the last one. Does nothing
    outside the main thread."""

    def __init__(self, emit: EventSink = ignore_event) -> None:
        self.stop = False
        self.signal_number: int = signal.SIGINT
        self.step_seconds: float | None = None  # of the last step, to tell how long the current one may take
        self._emit = emit
        self._abandonable = self._abandons = False
        self._previous_handlers: dict[int, Any] = {}
        self._previous_hook = sys.unraisablehook

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # ignored signals stay ignored, such as under `nohup`
                    self._previous_handlers[number] = signal.signal(number, self._on_signal)
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._previous_hook
        if self.stop and isinstance(error, LOSSES):  # the run was stopping anyway
            raise Interrupted(f"{STOPPED}: {error}; the same command resumes the run", self.signal_number) from error

    def stopped(self, step: int, total_steps: int, run_dir: Path) -> Interrupted:
        """Builds the exception that ends a run after `step`."""
        next_ = f"goes on from step {step + 1}" if step < total_steps else "makes the validation that is missing"
        kept = f"{run_dir} holds its checkpoint, and the same command {next_}"
        then = kept if step else "there is no checkpoint yet, and the same command starts over"
        return Interrupted(f"{STOPPED} after step {step} of {total_steps}; {then}", self.signal_number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        if self.stop and self._abandonable:
            self._abandonable, self._abandons = False, True
            raise KeyboardInterrupt
        if not self.stop:
            took = "" if self.step_seconds is None else f" (the last one took {self.step_seconds:.0f} s)"
            self._emit(Notice(f"stopping after this step{took}; press Ctrl-C again to abandon the step"))
        self.stop = True

    def _on_unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        """Sends the second signal again if it met a callback of the garbage collector, which lets no exception out."""
        if not (self._abandons and lost.exc_type is KeyboardInterrupt):
            return self._previous_hook(lost)
        self._abandonable, self._abandons = True, False
        threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), self.signal_number)).start()

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Marks a block that changes no state: a second signal ends it at once."""
        self._abandonable = True
        try:
            yield
        finally:
            self._abandonable = self._abandons = False
