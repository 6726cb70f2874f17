"""Plays two environments: sums of digits, and GuessTheNumber as examples/environments/guess_the_number does."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.registry import import_module

PLACE = Path(__file__).parents[1]
GUESSES = import_module(str(PLACE / "guess_the_number" / "agent.py"))


def act(turns: Sequence[str], skilled: bool, rng: random.Random) -> str:
    """Answers a sum, rightly or with any number; or guesses."""
    if not (asked := re.findall(r"problem: (\d) ([+-]) (\d) =", turns[0])):
        guess: str = GUESSES.act(turns, skilled, rng)
        return guess
    first, sign, second = asked[0]
    total = int(first) + int(sign + second)
    return f"<answer>{total if skilled else rng.randint(-9, 18)}</answer>"


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes rows and demonstrations."""
    return import_module(str(PLACE / "play.py")).tables(PLACE / "mixed", seed, rows, act)
