"""Rows of sums, after three worked examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.environments.adapters.reasoning_gym import ASK
from etude.registry import import_module

ASKED = "State the final answer to the following arithmetic problem:"
EXAMPLES = tuple(
    {"role": role, "content": content}
    for asked, answer in (("3 + 4", 7), ("9 - 1", 8), ("2 + 9", 11))
    for role, content in (
        ("user", f"{ASKED} {asked} =\n{ASK}"),
        ("assistant", f"<answer>{answer}</answer>"),
    )
)


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes the rows."""
    here = Path(__file__).parent
    return import_module(str(here.parent / "play.py")).tables(here, seed, rows, shown=EXAMPLES)
