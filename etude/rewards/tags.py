"""Rewards for the format of a solution: `compute_score` requires the tags in order and nothing outside, `count_tags`
gives partial credit. A tag with which the prompt ends counts as the solution's first.

Invariant: linear in the text, whatever tags it holds; a text of more than `MAX_CHARS` characters scores 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etude.rewards.view import with_opening

MAX_CHARS = 1_000_000
DEFAULT_TAGS = ("think", "answer")


def compute_score(solution_str: str, tags: Sequence[str] = DEFAULT_TAGS, trajectory: Any = None) -> float:
    """1.0 if the text is `<tag>…</tag>` for each of `tags`, once, in order, none blank, with only whitespace between; else
    0.0."""
    if len(solution_str) > MAX_CHARS or not tags:
        return 0.0
    text, position = with_opening(solution_str, trajectory, *tags), 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return 0.0
        start, end = text.index(opening), text.index(closing)
        if start < position or text[position:start].strip() or not text[start + len(opening) : end].strip():
            return 0.0
        position = end + len(closing)
    return float(not text[position:].strip())


def count_tags(solution_str: str, tags: Sequence[str] = DEFAULT_TAGS, trajectory: Any = None) -> float:
    """Returns the fraction of the opening and closing `tags` that occur in the text exactly once."""
    if len(solution_str) > MAX_CHARS or not tags:
        return 0.0
    text = with_opening(solution_str, trajectory, *tags)
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    return sum(text.count(mark) == 1 for mark in marks) / len(marks)
