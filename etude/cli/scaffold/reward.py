"""The reward: a number for a finished trajectory. `solution_str` is what the model wrote, never what a tool answered."""

from __future__ import annotations

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 if the last number of the answer is the right one.

    The last one only: a scorer that looks for the truth anywhere also pays for listing all numbers, and a policy finds that
    out. `etude env test` tries such answers.
    """
    numbers = re.findall(r"-?\d+(?:\.\d+)?", re.sub(r",(?=\d{3}(?!\d))", "", solution_str))
    return float(bool(numbers) and float(numbers[-1]) == float(ground_truth))
