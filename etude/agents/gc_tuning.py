"""Python's garbage collector while many trajectories are in flight.

A thousand trajectories keep millions of objects alive, and a collector pass traverses all of them, plus those of torch and
transformers: most of the Python cost of a rollout of that size. So during a rollout only objects created in it are
traversed, and less often. When it ends, its results move to the oldest generation untraversed: nearly all of them are freed
by their last reference once the step is over, and a pass at that moment would find them all alive.

Invariant: when the last block ends, the collector is as before; a program that froze objects itself is left alone. Garbage
in cycles does not pile up: a rollout starts with a full pass if earlier ones left many objects untraversed.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (300_000, 20, 20)  # Python's own are 700, 10, 10: passes over young, middle-aged and all objects
_FROZEN_BY_PYTHON = 1_000  # at most: 3.12 starts with some 400 objects frozen; a program that freezes has 100,000
_UNSEEN = 500_000  # max untraversed objects: those of several rollouts of a thousand trajectories
_lock = threading.Lock()
_blocks = 0
_found: tuple[int, int, int] | None = None
_unseen = 0


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Blocks may overlap, in one event loop or in several."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _blocks, _found, _unseen
    with _lock:
        _blocks += 1
        if _blocks > 1 or not gc.isenabled() or gc.get_freeze_count() > _FROZEN_BY_PYTHON:
            return
        if _unseen > _UNSEEN:
            _unseen = 0
            gc.collect()
        _found = gc.get_threshold()
        gc.freeze()
        gc.set_threshold(*map(max, _THRESHOLDS, _found))


def _leave() -> None:
    global _blocks, _found, _unseen
    with _lock:
        _blocks -= 1
        if _blocks == 0 and _found is not None:
            young, passes, longer = gc.get_count()
            first, second, _ = gc.get_threshold()
            _unseen += young + first * (passes + second * longer)  # `get_freeze_count` would walk through them all
            gc.freeze()
            gc.set_threshold(*_found)
            gc.unfreeze()
            _found = None
