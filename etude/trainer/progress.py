"""`RolloutProgress`: how far a rollout is that belongs to no training step, such as an evaluation's.

Invariant: a bar on a terminal, elsewhere a line every few seconds, both on stderr; a reader that goes away disturbs nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from rich.progress import MofNCompleteColumn, Progress

from etude.trainer.display import RunConsole, duration

_LINE_SECONDS = 5.0
_POLL_SECONDS = 0.5


class RolloutProgress:
    """A context manager, which asks `progress` for (trajectories that have ended, all of them) from a thread of its own."""

    def __init__(self, title: str, progress: Callable[[], tuple[int, int]], enabled: bool = True) -> None:
        self._console = RunConsole(stderr=True)
        self._title, self._enabled = title, enabled
        self._started = self._told = time.monotonic()
        self._live: Progress | None = None
        self._progress, self._over = progress, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="etude-progress", daemon=True)

    def __enter__(self) -> RolloutProgress:
        if self._enabled and self._console.is_terminal:
            columns = (*Progress.get_default_columns(), MofNCompleteColumn())
            self._live = Progress(*columns, console=self._console, transient=True)
            self._task = self._live.add_task(self._title, total=None)
            self._live.start()
        if self._enabled:
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            self(*self._progress())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        if self._enabled:
            self._thread.join()
            self(*self._progress())
        if self._live is not None:
            self._live.stop()

    def __call__(self, done: int, total: int) -> None:
        """Shows that `done` of `total` have ended."""
        with suppress(OSError):
            if self._live is not None:
                self._live.update(self._task, completed=done, total=total)
            elif self._enabled and (now := time.monotonic()) - self._told >= _LINE_SECONDS:
                self._told = now
                left = (now - self._started) * (total - done) / max(done, 1)
                told = f" · {duration(left)} left" if 10 * done >= total else ""  # the first few say little of the rest
                self._console.print(f"{self._title}: {done}/{total} rollouts{told}", soft_wrap=True, highlight=False)
