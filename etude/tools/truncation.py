"""Truncates a tool's response to a number of characters and tokens.

Invariant: the result, truncation mark included, is within the limits; tokens are counted as the chat template encodes them.
The result consists of whole characters of the response, and a response that fits is returned unchanged, except that lone
surrogates, which tokenizers reject, become '?'. Work is bounded by the limit, however long the response is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etude.schemas import ToolResponse
from etude.tools.options import CallPolicy

_MARKS = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}
_USUAL_CHARACTERS_PER_TOKEN = 8  # above that of most text, whose ends are then found in an eighth of the work
_CHARACTERS_PER_TOKEN = 64  # above the average of any text: characters beyond it are never tokenized
_TOKENS_PER_CHARACTER = 4  # a character has at most four bytes, a token at least one


@dataclass(frozen=True)
class TokenLimit:
    """The agent loop's limit of a tool response; a tool's `config` can set a lower one.

    Attributes:
        max_tokens: at least 1; None for no limit.
        side: the part that is truncated: "left", "middle" or "right". A mark replaces it, if the mark fits.
        tokenizer: finds the cut positions.
        count: counts the tokens of a text in its final context.
        max_chars: the limit in characters, where that is the unit.
    """

    max_tokens: int | None
    side: str
    tokenizer: Any
    count: Callable[[str], int]
    max_chars: int | None = None

    def cut(self, text: str, max_tokens: int | None = None, side: str | None = None) -> str:
        """Truncates `text` to `max_tokens` or the limit's `max_tokens`, whichever is smaller."""
        limit = min(filter(None, (max_tokens, self.max_tokens)), default=None)
        if limit is None or _TOKENS_PER_CHARACTER * len(text) <= limit:
            return text
        if len(text) <= _CHARACTERS_PER_TOKEN * limit and self.count(text) <= limit:
            return text
        side = side or self.side
        mark = _MARKS[side] if self.count(_MARKS[side]) < limit else ""
        head, offsets = self._end_of(text, limit, slice)
        ends = [end for _, end in offsets]
        tail, offsets = self._end_of(text, limit, lambda chars: slice(-chars, None))
        starts = [start for start, _ in offsets]
        kept = limit
        while kept > 0:
            first = _head_length(kept, side)
            last = kept - first
            cut = (head[: ends[:first][-1]] if first else "") + mark + (tail[starts[-last:][0] :] if last else "")
            size = self.count(cut)
            if size <= limit:
                return cut
            kept = min(kept - 1, kept * limit // size)
        return mark

    def exceeded(self, text: str, max_tokens: int) -> bool:
        """Whether `text`, tokenized without context, is longer than `max_tokens` tokens."""
        if _TOKENS_PER_CHARACTER * len(text) <= max_tokens:
            return False
        return len(text) > _CHARACTERS_PER_TOKEN * max_tokens or len(self._offsets(text)) > max_tokens

    def _end_of(self, text: str, limit: int, end: Callable[[int], slice]) -> tuple[str, list[tuple[int, int]]]:
        """Returns an end of `text` of well over `limit` tokens, if it has as many, and their offsets in it."""
        for chars in (_USUAL_CHARACTERS_PER_TOKEN * limit, _CHARACTERS_PER_TOKEN * limit):
            part = text[end(chars)]
            offsets = self._offsets(part)
            if len(offsets) > limit + limit // 4 or len(part) == len(text):
                break
        return part, offsets

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        """Returns (start, end) in characters of each token of `text`."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(int(start), int(end)) for start, end in encoded["offset_mapping"]]


def bound_text(
    text: str, tokens: TokenLimit | None, max_chars: int, max_tokens: int | None = None, side: str | None = None
) -> str:
    """Truncates `text` to these limits and those of `tokens`; `side` (default: that of `tokens`) is the part that is cut."""
    side = side or (tokens.side if tokens else "middle")
    if tokens is not None and tokens.max_chars is not None:
        max_chars = min(max_chars, tokens.max_chars)
    if len(text) > max_chars:
        mark = _MARKS[side] if len(_MARKS[side]) < max_chars else ""
        kept = max_chars - len(mark)
        first = _head_length(kept, side)
        text = text[:first] + mark + text[len(text) - (kept - first) :]
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")
    return text if tokens is None else tokens.cut(text, max_tokens, side)


def bound_response(response: ToolResponse, policy: CallPolicy, tokens: TokenLimit | None) -> ToolResponse:
    """Returns `response` with its text truncated to the limits of the policy and of `tokens`."""
    if not response.text:
        return response
    side = policy.tool_response_truncate_side
    text = bound_text(response.text, tokens, policy.max_response_chars, policy.max_response_tokens, side)
    return response if text == response.text else response.model_copy(update={"text": text})


def _head_length(kept: int, side: str) -> int:
    """Returns how many of `kept` characters or tokens precede the mark."""
    return {"left": 0, "right": kept, "middle": kept // 2}[side]
