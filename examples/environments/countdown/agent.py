"""Rows of countdown, after one worked example of two attempts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.environments.adapters.reasoning_gym import AGAIN, ASK
from etude.registry import import_module

ASKED = "Find a way to make 12 using all of these numbers: 15, 3.\nEach number can only be used once."
EXAMPLE = (
    {"role": "user", "content": f"{ASKED}\n{ASK}"},
    {"role": "assistant", "content": "<answer>15 + 3</answer>"},
    {"role": "user", "content": f"{AGAIN} {ASK}"},
    {"role": "assistant", "content": "<answer>15 - 3</answer>"},
)


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes the rows."""
    here = Path(__file__).parent
    return import_module(str(here.parent / "play.py")).tables(here, seed, rows, shown=EXAMPLE)
