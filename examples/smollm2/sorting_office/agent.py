"""The office of examples/sorting_office, after two worked examples, whose towns are no others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.quickstart.prepare import show_example
from etude.registry import import_module

OFFICE = import_module(str(Path(__file__).parents[2] / "sorting_office" / "agent.py"))
EXAMPLES = tuple(
    {"role": role, "content": content}
    for (first, tray), (second, other) in (
        (("Bergen", "north"), ("Lisbon", "west")),
        (("Rome", "south"), ("Warsaw", "east")),
    )
    for role, content in (
        ("user", f"Sort these.\nLetter to {first}."),
        ("assistant", f'[sort(tray="{tray}")]'),
        ("tool", f"Letter to {second}."),
        ("assistant", f'[sort(tray="{other}")]'),
        ("tool", "All sorted."),
        ("assistant", "Done."),
    )
)


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes the rows."""
    return show_example(OFFICE.prepare(folder, seed, rows), EXAMPLES)
