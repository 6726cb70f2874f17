"""Plays FrozenLake on maps that the seed draws: a way around the holes, or any step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.registry import import_module

STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def act(turns: Sequence[str], skilled: bool, rng: random.Random) -> str:
    """Follows a shortest way, or takes any step."""
    return shortest_way(turns[-1]) if skilled else rng.choice([*STEPS])


def shortest_way(seen: str) -> str:
    """The first step of a shortest way to the goal, on the map that is seen."""
    lines = [line for line in seen.splitlines() if set(line) <= set("[]SFHG")]
    row, column = next((n, line.index("[")) for n, line in enumerate(lines) if "[" in line)
    cells = [line.replace("[", "").replace("]", "") for line in lines]
    waiting, visited = deque([(row, column, "")]), {(row, column)}
    while waiting:
        row, column, first = waiting.popleft()
        if cells[row][column] == "G":
            return first
        for name, (down, right) in STEPS.items():
            place = row + down, column + right
            inside = 0 <= place[0] < len(cells) and 0 <= place[1] < len(cells)
            if inside and place not in visited and cells[place[0]][place[1]] != "H":
                visited.add(place)
                waiting.append((*place, first or name))
    raise ValueError(f"there is no way: {seen}")


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes rows and demonstrations."""
    here = Path(__file__).parent
    return import_module(str(here.parent / "play.py")).tables(here, seed, rows, act)
