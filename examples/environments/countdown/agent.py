"""Rows of countdown, after two worked examples, one of them of two attempts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.environments.adapters.reasoning_gym import AGAIN, ASK
from etude.registry import import_module

ASKED = "Find a way to make {} using all of these numbers: {}, {}.\nEach number can only be used once.\n" + ASK
EXAMPLES = (
    {"role": "user", "content": ASKED.format(15, 3, 5)},
    {"role": "assistant", "content": "<answer>3 * 5</answer>"},
    {"role": "user", "content": ASKED.format(7, 9, 2)},
    {"role": "assistant", "content": "<answer>9 + 2</answer>"},
    {"role": "user", "content": f"{AGAIN} {ASK}"},
    {"role": "assistant", "content": "<answer>9 - 2</answer>"},
)


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes the rows."""
    here = Path(__file__).parent
    return import_module(str(here.parent / "play.py")).tables(here, seed, rows, shown=EXAMPLES)
