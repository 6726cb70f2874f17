"""The office of examples/sorting_office, after one worked example, whose towns are no others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.quickstart.prepare import show_example
from etude.registry import import_module

OFFICE = import_module(str(Path(__file__).parents[2] / "sorting_office" / "agent.py"))
EXAMPLE = (
    {"role": "user", "content": "Sort these.\nLetter to Bergen."},
    {"role": "assistant", "content": '[sort(tray="north")]'},
    {"role": "tool", "content": "Letter to Lisbon."},
    {"role": "assistant", "content": '[sort(tray="west")]'},
    {"role": "tool", "content": "All sorted."},
    {"role": "assistant", "content": "Done."},
)


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes the rows."""
    return show_example(OFFICE.prepare(folder, seed, rows), EXAMPLE)
