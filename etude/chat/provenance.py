"""`Run`: token ids with one provenance. The mask needs to know only which ids were sampled; who wrote the others is for
dumps, the viewer and exports."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from etude.trajectory import Provenance

Run = tuple[list[int], Provenance]


class ContentSpan(NamedTuple):
    """Character range [start, end) of a text that holds a message's content; `owner` is its provenance."""

    start: int
    end: int
    owner: Provenance


def label_runs(ids: list[int], offsets: Sequence[tuple[int, int]], spans: Sequence[ContentSpan]) -> list[Run]:
    """Splits the ids of a text by provenance: a token that overlaps a span is its owner's (of two spans, the first's), all
    others are TEMPLATE.

    Args:
        offsets: (start, end) of each token in the text, sorted.
        spans: sorted, and not overlapping.
    """
    runs: list[Run] = []
    done = 0
    for start, end, owner in spans:
        first = bisect_right(offsets, start, done, key=itemgetter(1))
        last = bisect_left(offsets, end, first, key=itemgetter(0))
        if first < last and start < end:
            _add(runs, ids[done:first], Provenance.TEMPLATE)
            _add(runs, ids[first:last], owner)
            done = last
    _add(runs, ids[done:], Provenance.TEMPLATE)
    return runs


def _add(runs: list[Run], ids: list[int], label: Provenance) -> None:
    if ids and runs and runs[-1][1] is label:
        runs[-1] = (runs[-1][0] + ids, label)
    elif ids:
        runs.append((ids, label))
