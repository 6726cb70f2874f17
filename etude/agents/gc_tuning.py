"""Tunes Python's garbage collector while many trajectories are in flight.

A thousand trajectories keep millions of objects alive, and a full GC pass traverses all of them, plus those of torch and
transformers: most of the Python cost of a rollout of that size. So during a rollout only objects created in it are
traversed, and less often. When it ends, its results move to the oldest generation untraversed: nearly all of them are freed
by reference counting once the step is over, and a pass at that moment would find them all alive.

Invariant: when the last block ends, the collector's settings are restored; a program that calls `gc.freeze` itself is left
alone. Cyclic garbage does not pile up: a rollout starts with a full pass if earlier ones left many objects untraversed.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (300_000, 20, 20)  # Python's defaults are 700, 10, 10, for generations 0, 1 and 2
_FROZEN_BY_PYTHON = 1_000  # upper bound: 3.12 starts with about 400 frozen objects; `gc.freeze` in a program, 100,000
_UNSEEN = 500_000  # maximum untraversed objects, about several rollouts of a thousand trajectories
_lock = threading.Lock()
_blocks = 0
_saved_thresholds: tuple[int, int, int] | None = None
_unseen = 0


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Relaxes garbage collection during the block; blocks may overlap, in one event loop or several."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _blocks, _saved_thresholds, _unseen
    with _lock:
        _blocks += 1
        if _blocks > 1 or not gc.isenabled() or gc.get_freeze_count() > _FROZEN_BY_PYTHON:
            return
        if _unseen > _UNSEEN:
            _unseen = 0
            gc.collect()
        _saved_thresholds = gc.get_threshold()
        gc.freeze()
        gc.set_threshold(*map(max, _THRESHOLDS, _saved_thresholds))


def _leave() -> None:
    global _blocks, _saved_thresholds, _unseen
    with _lock:
        _blocks -= 1
        if _blocks == 0 and _saved_thresholds is not None:
            young, passes, longer = gc.get_count()
            first, second, _ = gc.get_threshold()
            _unseen += young + first * (passes + second * longer)  # estimated: `get_freeze_count` walks all objects
            gc.freeze()
            gc.set_threshold(*_saved_thresholds)
            gc.unfreeze()
            _saved_thresholds = None
