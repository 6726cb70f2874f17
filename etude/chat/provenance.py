"""`Run`: token ids with one provenance. The mask needs to know only which ids were sampled; who wrote the others is for
dumps, the viewer and exports."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from etude.trajectory import Provenance

Run = tuple[list[int], Provenance]
Span = tuple[int, int, Provenance]
"""Character range [start, end) of a text that holds a message's content, and the content's provenance."""


def label_runs(ids: list[int], offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[Run]:
    """Splits the ids of a text by provenance: a token that overlaps a span is its owner's (of two spans, the first's), all
    others are TEMPLATE.

    Args:
        offsets: (start, end) of each token in the text, sorted.
        spans: sorted, and not overlapping.
    """
    labels = [Provenance.TEMPLATE] * len(ids)
    done = 0
    for start, end, owner in spans:
        first = bisect_right(offsets, start, done, key=itemgetter(1))
        last = bisect_left(offsets, end, first, key=itemgetter(0))
        if first < last and start < end:
            labels[first:last] = [owner] * (last - first)
            done = last
    runs = groupby(zip(ids, labels), key=itemgetter(1))
    return [([number for number, _ in run], label) for label, run in runs]
