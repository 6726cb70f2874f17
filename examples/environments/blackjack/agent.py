"""Plays Blackjack: sticks from 17 on, or does anything."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.registry import import_module


def act(turns: Sequence[str], skilled: bool, rng: random.Random) -> str:
    """Hits below 17, or does either."""
    total = int(re.findall(r"your sum: (\d+)", turns[-1])[0])
    return ("hit" if total < 17 else "stick") if skilled else rng.choice(("hit", "stick"))


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes rows and demonstrations."""
    here = Path(__file__).parent
    return import_module(str(here.parent / "play.py")).tables(here, seed, rows, act)
