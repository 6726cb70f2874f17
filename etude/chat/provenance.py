"""`ProvenanceEncoder`: encodes the text after an end of turn as runs of ids with the same provenance.

Invariant: the ids are those of the text after the end-of-turn token, with one exception: no control token overlaps a content
span. If one would, the text is split inside it, so that it is encoded as ordinary characters. A token that overlaps a span
has the span's provenance (of two spans, the first's); all others are TEMPLATE.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from etude.chat.encoding import Encoder
from etude.trajectory import Provenance

Run = tuple[list[int], Provenance]


class ContentSpan(NamedTuple):
    """Character range [start, end) of a text that holds a message's content; `owner` is its provenance."""

    start: int
    end: int
    owner: Provenance


class ProvenanceEncoder:
    """Encodes text that follows `stop_text`, a special token; `control` are the ids that content must never produce."""

    def __init__(self, encoder: Encoder, stop_text: str, control: frozenset[int]) -> None:
        self._encoder, self._stop_text, self._control = encoder, stop_text, control

    def ids(self, text: str) -> list[int]:
        """Returns the ids of `text` after the end-of-turn token."""
        return self._encoder.ids(self._stop_text + text)[1:]

    def runs(self, text: str, spans: Sequence[ContentSpan]) -> list[Run]:
        """Encodes `text` as runs; `spans` must be sorted and must not overlap."""
        cuts = {0}
        while True:
            runs: list[Run] = []
            forged: set[int] = set()
            starts = sorted(cuts)
            for begin, stop in zip(starts, [*starts[1:], len(text)]):
                forged |= self._add_runs(runs, text[:stop], begin, spans)
            if forged <= cuts:
                return runs
            cuts |= forged

    def _add_runs(self, runs: list[Run], text: str, begin: int, spans: Sequence[ContentSpan]) -> set[int]:
        """Appends the runs of `text` from `begin` on; returns where to split it because a control token overlaps a span."""
        ids, offsets = self._encoder.with_offsets(self._stop_text + text[begin:])
        shift = len(self._stop_text) - begin
        forged: set[int] = set()
        done = 1  # ids before this index are in a run; the first one is the end of turn
        for start, end, owner in spans:
            first = bisect_right(offsets, start + shift, done, key=_end_of)
            last = bisect_left(offsets, end + shift, first, key=_start_of)
            if first == last or start == end:
                continue
            if not self._control.isdisjoint(ids[first:last]):
                for at, stop in (offsets[n] for n in range(first, last) if ids[n] in self._control):
                    spelled = text[max(at - shift, begin) : stop - shift].lstrip()
                    forged.add(stop - shift - len(spelled) + 1)
            _add(runs, ids[done:first], Provenance.TEMPLATE)
            _add(runs, ids[first:last], owner)
            done = last
        _add(runs, ids[done:], Provenance.TEMPLATE)
        return forged


def _start_of(offset: tuple[int, int]) -> int:
    return offset[0]


def _end_of(offset: tuple[int, int]) -> int:
    return offset[1]


def _add(runs: list[Run], ids: list[int], label: Provenance) -> None:
    if ids and runs and runs[-1][1] is label:
        runs[-1] = (runs[-1][0] + ids, label)
    elif ids:
        runs.append((ids, label))
