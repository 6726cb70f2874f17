"""Ctrl-C and SIGTERM without loss.

The first signal asks the loop to stop after the step in hand; the second abandons that step, but only while nothing is
being changed (a rollout): then it raises KeyboardInterrupt, which cancels the trajectories and releases their tools. A
second signal during an update waits for the update. Either way the loop goes on to save and close.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Context manager that owns the signals; `stop` is true once one has come. Elsewhere than in the main thread it
    does nothing."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.stop = False
        self._note = note
        self._abandonable = False
        self._held: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._held = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._held.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop and self._abandonable:
            self._abandonable = False
            raise KeyboardInterrupt
        if not self.stop:
            self._note("stopping after this step; press Ctrl-C again to abandon the step")
        self.stop = True

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Inside the block nothing is changed, so that a second signal may end it at once."""
        self._abandonable = True
        try:
            yield
        finally:
            self._abandonable = False
