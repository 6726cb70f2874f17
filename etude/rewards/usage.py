"""What judges use: requests, tokens and cost, counted where they are incurred and summed per rollout.

Invariant: everything is counted, failed attempts and votes included; a request that serves several rollouts (a
comparison) counts once, for one of them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_lock = threading.Lock()
_counters: ContextVar[tuple[Counter[str], ...]] = ContextVar("etude_judge_usage", default=())


@contextmanager
def counting(into: Counter[str]) -> Iterator[None]:
    """Adds usage inside the block, that of tasks and threads started there included, to `into`."""
    token = _counters.set((*_counters.get(), into))
    try:
        yield
    finally:
        _counters.reset(token)


def count(**amounts: float) -> None:
    """Counts `requests`, `cached` (verdicts that needed no request), `prompt_tokens`, `completion_tokens`, `cost`."""
    for counter in _counters.get():
        with _lock:  # threads share one
            counter.update(amounts)
