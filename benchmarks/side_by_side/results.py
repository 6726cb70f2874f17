"""Readings of all rows, kept in one JSON file that later runs extend.

Invariant: a row's readings all come from one run, with its contenders alternating; running a row again replaces them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Measured:
    """Readings of one row: `readings[contender]` holds a mapping of figures per repetition."""

    kind: str
    name: str
    title: str
    figures: tuple[str, ...]
    targets: Mapping[str, float]
    readings: Mapping[str, list[dict[str, float]]]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def contenders(self) -> list[str]:
        return list(self.readings)

    def values(self, contender: str, figure: str) -> list[float]:
        """Returns the figure for each repetition that has it."""
        return [reading[figure] for reading in self.readings[contender] if figure in reading]

    def median(self, contender: str, figure: str) -> float | None:
        """Returns the figure's median; None if the contender does not have it."""
        values = self.values(contender, figure)
        return statistics.median(values) if values else None

    def quartiles(self, contender: str, figure: str) -> tuple[float, float] | None:
        """Returns the figure's first and third quartile; None for fewer than two repetitions."""
        values = self.values(contender, figure)
        if len(values) < 2:
            return None
        first, _, third = statistics.quantiles(values, n=4, method="inclusive")
        return first, third

    def ratio(self, peer: str, figure: str) -> float | None:
        """Returns the median over repetitions of the first contender's figure divided by the peer's."""
        ours, theirs = self.values(self.contenders[0], figure), self.values(peer, figure)
        ratios = [a / b for a, b in zip(ours, theirs) if b]
        return statistics.median(ratios) if ratios else None


class Results:
    """The JSON file of results."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[Measured]:
        """Returns everything measured so far, in the order in which it was first measured."""
        if not self._path.exists():
            return []
        return [Measured(**{**row, "figures": tuple(row["figures"])}) for row in json.loads(self._path.read_text())]

    def put(self, row: Measured) -> None:
        """Adds a row, or replaces the one with its name."""
        held = self.load()
        places = [i for i, old in enumerate(held) if old.name == row.name]
        held[places[0] if places else len(held) :] = [row, *held[places[0] + 1 if places else len(held) :]]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps([asdict(entry) for entry in held], indent=1, ensure_ascii=False))

    def put_newer(self, row: Measured) -> None:
        """Like `put`, but keeps a row that was measured later than this one."""
        held = next((old for old in self.load() if old.name == row.name), None)
        if held is None or held.conditions.get("time", 0.0) <= row.conditions.get("time", 0.0):
            self.put(row)
