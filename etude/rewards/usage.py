"""What judges use: requests, tokens and money, counted where they are spent and added up for each rollout.

Invariant: everything is counted, of failed attempts and votes too; what one request does for several rollouts (a comparison)
counts once, for one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_counters: ContextVar[tuple[Counter[str], ...]] = ContextVar("etude_judge_usage", default=())


@contextmanager
def counting(into: Counter[str]) -> Iterator[None]:
    """Adds what is used within, in tasks and threads that begin there too, to `into`."""
    token = _counters.set((*_counters.get(), into))
    try:
        yield
    finally:
        _counters.reset(token)


def count(**amounts: float) -> None:
    """Counts `requests`, `cached` (answers that needed none), `prompt_tokens`, `completion_tokens`, `cost`."""
    for counter in _counters.get():
        counter.update(amounts)
