"""Plays TicTacToe, both sides: the model's demonstrations, and the opponent, who takes any free cell."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.registry import import_module

LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


def act(turns: Sequence[str], skilled: bool, rng: random.Random) -> str:
    """Completes a line, or blocks the other's; else, and if not skilled, takes any free cell."""
    free, cells = read_board(turns[-1])
    for mark in "OX" if skilled else "":
        for line in LINES:
            left = [cell for cell in line if cells[int(cell)] != mark]
            if len(left) == 1 and left[0] in free:
                return f"[{left[0]}]"
    return f"[{rng.choice(free)}]"


def play_other(seen: str) -> str:
    """The opponent: any free cell, from the game's own generator."""
    return f"[{random.choice(read_board(seen)[0])}]"


def read_board(seen: str) -> tuple[list[str], list[str]]:
    """The free cells, and the marks of all nine, of the last board that is seen."""
    board = seen.rpartition("Current Board:")[2]
    return re.findall(r"\[(\d)\]", board), re.findall(r"[OX\d]", board.partition("Available")[0])


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes rows and demonstrations."""
    here = Path(__file__).parent
    return import_module(str(here.parent / "play.py")).tables(here, seed, rows, act)
