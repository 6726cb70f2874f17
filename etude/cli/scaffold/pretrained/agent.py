"""How far is it from one town to another? Nobody knows but the tool."""

import random
import re
import zlib
from pathlib import Path

from etude.quickstart.example import Rows
from etude.tools import ToolError, function_tool

TOWNS = ["Athens", "Berlin", "Dublin", "Geneva", "Hamburg", "Lisbon", "London", "Lyon"]
TOWNS += ["Madrid", "Milan", "Munich", "Naples", "Oslo", "Paris", "Prague", "Rome"]


def km(start: str, end: str) -> int:
    return 120 + zlib.crc32(" ".join(sorted((start, end))).encode()) % 3800


@function_tool
def road(start: str, end: str) -> str:
    """Looks up the length of the road between two towns, in km.

    Args:
        start: one town
        end: the other town
    """
    for town in (start, end):
        if town not in TOWNS:
            raise ToolError(f"no town called {town}")  # the model reads this
    return str(km(start, end))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    numbers = re.findall(r"\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)


def question(start: str, end: str) -> dict:
    return {"role": "user", "content": f"How far is it from {start} to {end}?"}


# Before each question, as this model's chat template shows it no tools.
WORKED_EXAMPLE = [
    question("Geneva", "Milan"),
    {"role": "assistant", "content": '[road(start="Geneva", end="Milan")]'},
    {"role": "tool", "content": str(km("Geneva", "Milan"))},
    {"role": "assistant", "content": f"It is {km('Geneva', 'Milan')} km."},
]


def row(start: str, end: str) -> dict:
    prompt = [{"role": "system", "content": "Look up roads."}, *WORKED_EXAMPLE, question(start, end)]
    truth = {"style": "rule", "ground_truth": str(km(start, end))}
    return {"data_source": "AGENT_NAME", "prompt": prompt, "reward_model": truth}


def prepare(folder: Path, seed: int, rows: Rows) -> dict[str, list[dict]]:
    """Makes the rows of `etude quickstart`; no two are the same."""
    pairs = [(a, b) for a in TOWNS for b in TOWNS if a != b and {a, b} != {"Geneva", "Milan"}]
    random.Random(seed).shuffle(pairs)
    return {split: [row(*pairs.pop()) for _ in range(getattr(rows, split))] for split in ("train", "val", "test")}
