"""Cutting a tool's answer to a number of tokens.

Invariant: what comes out takes at most `limit` tokens, mark included, as the chat template will encode it; it is made of
whole characters of the answer, and an answer that fits is returned untouched. Work is bounded by the limit, however long
the answer is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MARKS = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}
_CHARACTERS_PER_TOKEN = 64  # more than any text has on average: what lies beyond is never looked at
_TOKENS_PER_CHARACTER = 4  # a character is at most four bytes, and a token at least one


def shorten(text: str, *, limit: int, side: str, tokenizer: Any, count: Callable[[str], int]) -> str:
    """`text` in at most `limit` tokens.

    Args:
        text: what a tool said.
        limit: tokens, at least 1.
        side: the part that is cut away: "left", "middle" or "right". A mark stands in its place, if it fits.
        tokenizer: finds the places to cut at.
        count: tokens of a text where it will stand.
    """
    if _TOKENS_PER_CHARACTER * len(text) <= limit:
        return text
    reach = _CHARACTERS_PER_TOKEN * limit
    if len(text) <= reach and count(text) <= limit:
        return text
    mark = _MARKS[side] if count(_MARKS[side]) < limit else ""
    head, tail = text[:reach], text[-reach:]
    ends = [end for _, end in _offsets(tokenizer, head)]
    starts = [start for start, _ in _offsets(tokenizer, tail)]
    kept = limit
    while kept > 0:
        first = {"left": 0, "right": kept, "middle": kept // 2}[side]
        last = kept - first
        cut = (head[: ends[:first][-1]] if first else "") + mark + (tail[starts[-last:][0] :] if last else "")
        size = count(cut)
        if size <= limit:
            return cut
        kept = min(kept - 1, kept * limit // size)
    return mark


def _offsets(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """(start, end) in characters of each token of `text`."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [(int(start), int(end)) for start, end in encoded["offset_mapping"]]
