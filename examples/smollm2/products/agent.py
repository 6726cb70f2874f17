"""Products of three and two digits, after one worked example: the model's chat template shows no tools."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from etude.data.prepare.sources import training_row
from etude.quickstart.prepare import show_example
from etude.quickstart.stories.agent import EXAMPLE, compute_score

__all__ = ["compute_score", "prepare"]


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes the questions; no two are the same."""
    factors = [(a, b) for a in range(100, 1000) for b in range(12, 100)]
    drawn = iter(random.Random(f"products/{seed}").sample(factors, rows.train + rows.val + rows.test))
    tables = {
        split: [row(*next(drawn), split, index) for index in range(getattr(rows, split))]
        for split in ("train", "val", "test")
    }
    return show_example(tables, EXAMPLE)


def row(a: int, b: int, split: str, index: int) -> dict[str, Any]:
    """A row for training or evaluation."""
    prompt = [("system", "Use the calculator."), ("user", f"What is {a} * {b}?")]
    return training_row("products", prompt, str(a * b), {}, ability="tools", extra={"index": index, "split": split})
