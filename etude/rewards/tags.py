"""Rewards for the format of a solution: `compute_score` requires the tags in order and nothing outside, `count_tags`
gives partial credit.

Invariant: linear in the text, whatever tags it holds; a text of more than `MAX_CHARS` characters scores 0.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_CHARS = 1_000_000
DEFAULT_TAGS = ("think", "answer")


def compute_score(solution_str: str, tags: Sequence[str] = DEFAULT_TAGS) -> float:
    """1.0 if the text is `<tag>…</tag>` for each of `tags`, once, in order, with only whitespace between; else 0.0."""
    if len(solution_str) > MAX_CHARS or not tags:
        return 0.0
    position = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if solution_str.count(opening) != 1 or solution_str.count(closing) != 1:
            return 0.0
        start, end = solution_str.index(opening), solution_str.index(closing)
        if start < position or end < start or solution_str[position:start].strip():
            return 0.0
        position = end + len(closing)
    return float(not solution_str[position:].strip())


def count_tags(solution_str: str, tags: Sequence[str] = DEFAULT_TAGS) -> float:
    """Returns the fraction of the opening and closing `tags` that occur in the text exactly once."""
    if len(solution_str) > MAX_CHARS or not tags:
        return 0.0
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    return sum(solution_str.count(mark) == 1 for mark in marks) / len(marks)
