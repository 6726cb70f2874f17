"""Curves made of characters: a row of bars, or a line in Braille dots.

Invariant: pure functions of the values; no output is longer than what was asked for, and a constant is a flat line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

_BARS = "▁▂▃▄▅▆▇█"
_BRAILLE_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # by column, from the bottom dot up


def resample(values: Sequence[float], count: int) -> list[float]:
    """At most `count` values: means of equal runs of `values`."""
    if len(values) <= count:
        return list(values)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as one row of at most `width` bars between their minimum and maximum; flat for a constant."""
    shown = resample(values, width)
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    return "".join(_BARS[round(_share(value, low, high) * 7) if high > low else 3] for value in shown)


def braille_curve(values: Sequence[float], width: int, rows: int, low: float, high: float) -> list[str]:
    """`values` as a curve of `rows` lines of `width` cells, each cell 2 x 4 dots, between `low` and `high`."""
    dots_high, dots_wide = rows * 4, width * 2
    cells = [[0] * width for _ in range(rows)]
    previous: int | None = None
    for x, value in enumerate(_stretched(resample(values, dots_wide), dots_wide)):
        y = round(_share(value, low, high) * (dots_high - 1)) if high > low else round(0.5 * (dots_high - 1))
        start = y if previous is None else previous + (y > previous) - (y < previous)
        for dot in range(min(start, y), max(start, y) + 1):  # joins the dots of a steep line
            cells[rows - 1 - dot // 4][x // 2] |= _BRAILLE_DOTS[x % 2][dot % 4]
        previous = y
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def _share(value: float, low: float, high: float) -> float:
    """Where between `low` and `high` a value lies, 0 to 1; sums too large for a float must not end the view."""
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _stretched(values: Sequence[float], count: int) -> Iterator[float]:
    """`values` interpolated linearly to `count` points; nothing for no values."""
    for i in range(count if values else 0):
        position = i * (len(values) - 1) / max(count - 1, 1)
        left = int(position)
        right = min(left + 1, len(values) - 1)
        yield values[left] + (position - left) * (values[right] - values[left])
