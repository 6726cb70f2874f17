"""`GlobalRandom`: the global random generators, for environments that draw from them, as many of other packages do.

Invariant: what a session draws inside its blocks depends on its seed alone, whatever other sessions draw meanwhile. Blocks
of all sessions run one after another, in any thread; code that draws from the global generators outside them shares
nothing with them but the time of a block.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np

_lock = threading.Lock()


class GlobalRandom:
    """The generators of one session: in `with` blocks, `random` and `numpy.random` continue from where its last block
    left."""

    def __init__(self, seed: int) -> None:
        self._own: tuple[Any, Any] = (random.Random(seed).getstate(), np.random.RandomState(seed).get_state())

    def __enter__(self) -> None:
        _lock.acquire()
        self._others = random.getstate(), np.random.get_state()
        _set(*self._own)

    def __exit__(self, *_: object) -> None:
        self._own = random.getstate(), np.random.get_state()
        _set(*self._others)
        _lock.release()


def _set(python: Any, numpy: Any) -> None:
    random.setstate(python)
    np.random.set_state(numpy)
