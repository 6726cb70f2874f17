"""Plays countdown with two numbers: an operator that fits, or any."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.registry import import_module


def act(turns: Sequence[str], skilled: bool, rng: random.Random) -> str:
    """Writes an expression with the numbers, in the order of the question or the other."""
    question = turns[0].partition(".\n")[0]
    target = re.findall(r"(?:make|equals|Calculate) (\d+)", question)[0]
    first, second = re.findall(r"numbers:? (\d+), (\d+)", question)[0]
    tried = [f"{a} {operator} {b}" for operator in "+*-/" for a, b in ((first, second), (second, first))]
    fits = [each for each in tried if eval(each) == int(target)]
    return f"<answer>{rng.choice(fits if skilled and fits else tried)}</answer>"


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes rows and demonstrations."""
    here = Path(__file__).parent
    return import_module(str(here.parent / "play.py")).tables(here, seed, rows, act)
