"""Moves the tower of three disks: the next move of a shortest way, or any that is allowed."""

from __future__ import annotations

import itertools
import random
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.registry import import_module

Board = tuple[tuple[int, ...], ...]


def act(turns: Sequence[str], skilled: bool, rng: random.Random) -> str:
    """Follows a shortest way from the board that is seen, or makes any allowed move."""
    board = tuple(
        tuple(map(int, re.findall(r"\d+", disks))) for disks in re.findall(r"^[ABC]: \[(.*)\]$", turns[-1], re.M)
    )
    return shortest_way(board) if skilled else rng.choice([move for move, _ in moves(board)])


def moves(board: Board) -> list[tuple[str, Board]]:
    """The allowed moves, and the boards after them."""
    found = []
    for source, target in itertools.permutations(range(3), 2):
        if board[source] and (not board[target] or board[source][-1] < board[target][-1]):
            towers = [*board]
            towers[source], towers[target] = board[source][:-1], (*board[target], board[source][-1])
            found.append((f"[{'ABC'[source]} {'ABC'[target]}]", tuple(towers)))
    return found


def shortest_way(board: Board) -> str:
    """The first move of a shortest way to a full tower C."""
    waiting, visited = deque([(board, "")]), {board}
    while True:
        now, first = waiting.popleft()
        for move, after in moves(now):
            if not after[0] and not after[1]:
                return first or move
            if after not in visited:
                visited.add(after)
                waiting.append((after, first or move))


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes rows and demonstrations."""
    here = Path(__file__).parent
    return import_module(str(here.parent / "play.py")).tables(here, seed, rows, act)
