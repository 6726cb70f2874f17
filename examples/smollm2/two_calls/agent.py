"""The catalogue of examples/two_calls, after two worked examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.quickstart.prepare import show_example
from etude.registry import import_module

CATALOGUE = import_module(str(Path(__file__).parents[2] / "two_calls" / "agent.py"))
EXAMPLES = tuple(
    {"role": role, "content": content}
    for name, number, price in (("grey table", "417", "286"), ("soft pillow", "903", "158"))
    for role, content in (
        ("user", f"Price of {name}?"),
        ("assistant", f'[find(name="{name}")]'),
        ("tool", number),
        ("assistant", f'[price(id="{number}")]'),
        ("tool", price),
        ("assistant", f"<answer>{price}</answer>"),
    )
)
serve = CATALOGUE.serve


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes the catalogue and the questions."""
    return show_example(CATALOGUE.prepare(folder, seed, rows), EXAMPLES)
