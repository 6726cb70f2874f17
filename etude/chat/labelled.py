"""`LabelledEncoder`: the text that follows an end of turn, as runs of ids of one provenance.

Invariant: the ids are those that the text has behind the end of turn, but for one thing: no control token overlaps a span
of contents. Where one would, the text is cut inside it, so that it comes out as the plain characters it consists of. A
token that overlaps a span is its owner's (of two, the first's); all others are TEMPLATE.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from etude.chat.encoding import Encoder
from etude.trajectory import Provenance

Run = tuple[list[int], Provenance]


class Owned(NamedTuple):
    """Characters [start, end) of a text, which belong to somebody else than the template."""

    start: int
    end: int
    owner: Provenance


class LabelledEncoder:
    """Encodes behind `stop_text`, the text of a special token; `control` are the ids that no content may become."""

    def __init__(self, encoder: Encoder, stop_text: str, control: frozenset[int]) -> None:
        self._encoder, self._stop_text, self._control = encoder, stop_text, control

    def ids(self, text: str) -> list[int]:
        """The ids of `text` behind the end of turn."""
        return self._encoder.ids(self._stop_text + text)[1:]

    def runs(self, text: str, spans: Sequence[Owned]) -> list[Run]:
        """The runs of `text`; `spans` in order, none overlapping another."""
        runs, forged = self.runs_behind(None, text, spans)
        return self._cut(text, spans) if forged else runs

    def runs_behind(self, special: str | None, text: str, spans: Sequence[Owned]) -> tuple[list[Run], bool]:
        """(runs of `text` behind a special token, by default the end of turn; whether a control token overlaps a span)."""
        prefix = self._stop_text if special is None else special
        ids, offsets = self._encoder.with_offsets(prefix + text)
        size, forged = len(prefix), False
        runs: list[Run] = []
        done = 1  # the ids before are in a run, or are `special`
        for start, end, owner in spans:
            first = bisect_right(offsets, start + size, done, key=_end_of)
            last = bisect_left(offsets, end + size, first, key=_start_of)
            if first == last or start == end:
                continue
            forged = forged or not self._control.isdisjoint(ids[first:last])
            _add(runs, ids[done:first], Provenance.TEMPLATE)
            _add(runs, ids[first:last], owner)
            done = last
        _add(runs, ids[done:], Provenance.TEMPLATE)
        return runs, forged

    def _cut(self, text: str, spans: Sequence[Owned]) -> list[Run]:
        """`runs`, the text cut wherever a control token would overlap a span."""
        owner = [Provenance.TEMPLATE] * len(text)
        for span in reversed(spans):
            owner[span.start : span.end] = [span.owner] * (span.end - span.start)
        cuts = {0}
        while True:
            starts = sorted(cuts)
            labelled = []
            found: set[int] = set()
            for begin, stop in zip(starts, [*starts[1:], len(text)]):
                ids, offsets = self._encoder.with_offsets(self._stop_text + text[begin:stop])
                shift = begin - len(self._stop_text)
                for number, (first, last) in zip(ids[1:], offsets[1:]):
                    start, end = max(first + shift, begin), last + shift
                    owners = [each for each in owner[start:end] if each is not Provenance.TEMPLATE]
                    labelled.append((number, owners[0] if owners else Provenance.TEMPLATE))
                    if owners and number in self._control:
                        found.add(end - len(text[start:end].lstrip()) + 1)
            if found <= cuts:
                runs = groupby(labelled, key=_label)
                return [([number for number, _ in run], label) for label, run in runs]
            cuts |= found


def _start_of(offset: tuple[int, int]) -> int:
    return offset[0]


def _end_of(offset: tuple[int, int]) -> int:
    return offset[1]


def _label(labelled: tuple[int, Provenance]) -> Provenance:
    return labelled[1]


def _add(runs: list[Run], ids: list[int], label: Provenance) -> None:
    if ids and runs and runs[-1][1] is label:
        runs[-1] = (runs[-1][0] + ids, label)
    elif ids:
        runs.append((ids, label))


def joined(*parts: Sequence[Run]) -> list[Run]:
    """`parts` one after the other, neighbouring runs of one provenance made one."""
    whole: list[Run] = []
    for part in parts:
        for ids, label in part:
            _add(whole, ids, label)
    return whole
