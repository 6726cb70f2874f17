"""Python's garbage collector while many trajectories are under way.

A thousand trajectories keep millions of objects alive, and a pass of the collector looks at all of them, at those of
torch and transformers too: most of what a rollout of that size costs in Python. Meanwhile only what is made during the
rollout is looked at, and less often.

Invariant: when the last block ends, the collector is as it was found; a program that froze objects itself is left alone.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (300_000, 20, 20)  # Python's own are 700, 10, 10: passes over young, middle-aged and all objects
_lock = threading.Lock()
_blocks = 0
_found: tuple[int, int, int] | None = None


@contextmanager
def calm_collector() -> Iterator[None]:
    """Blocks may overlap, in one event loop or in several."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _blocks, _found
    with _lock:
        _blocks += 1
        if _blocks > 1 or not gc.isenabled() or gc.get_freeze_count():
            return
        _found = gc.get_threshold()
        gc.freeze()
        gc.set_threshold(*map(max, _THRESHOLDS, _found))


def _leave() -> None:
    global _blocks, _found
    with _lock:
        _blocks -= 1
        if _blocks == 0 and _found is not None:
            gc.set_threshold(*_found)
            gc.unfreeze()
            _found = None
