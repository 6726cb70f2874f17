"""Plays GuessTheNumber: halves what is left, or guesses any of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.registry import import_module


def act(turns: Sequence[str], skilled: bool, rng: random.Random) -> str:
    """Guesses the middle of what the hints leave, or any of it."""
    low, high = 1, 20
    for guess, hint in zip(turns[1::2], turns[2::2]):
        low, high = (int(guess[1:-1]) + 1, high) if "higher" in hint else (low, int(guess[1:-1]) - 1)
    return f"[{(low + high) // 2 if skilled else rng.choice((low, high, rng.randint(low, high)))}]"


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes rows and demonstrations."""
    here = Path(__file__).parent
    return import_module(str(here.parent / "play.py")).tables(here, seed, rows, act)
