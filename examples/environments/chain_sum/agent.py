"""Rows of sums, after one worked example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.environments.adapters.reasoning_gym import ASK
from etude.registry import import_module

ASKED = "State the final answer to the following arithmetic problem: 41 + 23 - 12 ="
EXAMPLE = (
    {"role": "user", "content": f"{ASKED}\n{ASK}"},
    {"role": "assistant", "content": "<answer>52</answer>"},
)


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes the rows."""
    here = Path(__file__).parent
    return import_module(str(here.parent / "play.py")).tables(here, seed, rows, shown=EXAMPLE)
