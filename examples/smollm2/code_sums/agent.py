"""The sums of examples/code_sums, after two worked examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.quickstart.prepare import show_example
from etude.registry import import_module

SUMS = import_module(str(Path(__file__).parents[2] / "code_sums" / "agent.py"))
EXAMPLES = tuple(
    {"role": role, "content": content}
    for question, code, answer in (
        ("What is 48 * 31 - 17?", "48 * 31 - 17", "1471"),
        ("Compute 9 - 86 * 24.", "9 - 86 * 24", "-2055"),
    )
    for role, content in (
        ("user", question),
        ("assistant", f'[code_interpreter(code="print({code})")]'),
        ("tool", answer),
        ("assistant", f"The answer is \\boxed{{{answer}}}."),
    )
)


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes the questions."""
    return show_example(SUMS.prepare(folder, seed, rows), EXAMPLES)
