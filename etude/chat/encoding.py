"""`Encoder` and `Decoder`: convert text to token ids and back, one text at a time.

Invariant: ids and offsets are those of `tokenizer(text, add_special_tokens=False)`. Decoded text omits structural special
tokens (end of turn, padding), and keeps the tags that a model writes on purpose (tool calls, tool responses, reasoning),
even if the tokenizer declares them special. Decoded text is for reading: it is never re-encoded.

If the tokenizer's class does not override encoding, its Rust backend is called directly: a call through the Python class
costs several times as much, and its batch call wakes a thread pool for a single short text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAG = re.compile(r"</?(?:tool_call|tool_response|tool_calls|think)>")


def plain_backend(tokenizer: PreTrainedTokenizerBase, *methods: str) -> Any:
    """Returns the Rust backend of a fast tokenizer; None if its class (or a user's) overrides one of `methods`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for method in methods:
        owner = next((cls for cls in type(tokenizer).__mro__ if method in vars(cls)), None)
        if owner is None or not owner.__module__.startswith("transformers.tokenization_utils"):
            return None
    return backend


class Encoder:
    """Encodes with one fast tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        split = getattr(tokenizer, "split_special_tokens", False)
        self._backend = None if split else plain_backend(tokenizer, "__call__", "_encode_plus")

    def ids(self, text: str) -> list[int]:
        """Returns the ids of `text`."""
        backend = self._ready()
        if backend is not None:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
            return ids
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def ids_after(self, token: str, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of `text` as it follows the special token `token`, and the (start, end) character offsets of
        each."""
        backend = self._ready()
        if backend is not None:
            encoded = backend.encode(token + text, add_special_tokens=False)
            ids, offsets = encoded.ids, encoded.offsets
        else:
            encoding = self._tokenizer(token + text, add_special_tokens=False, return_offsets_mapping=True)
            ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
        return ids[1:], [(start - len(token), end - len(token)) for start, end in offsets[1:]]

    def _ready(self) -> Any:
        """Returns the backend, or None if another caller enabled padding or truncation, which would change ids."""
        backend = self._backend
        return None if backend is None or backend.padding is not None or backend.truncation is not None else backend


class Decoder:
    """Decodes with one tokenizer, dropping the ids in `hidden`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hidden: frozenset[int]) -> None:
        self.tokenizer, self._hidden = tokenizer, hidden
        self._backend = plain_backend(tokenizer, "decode", "_decode")  # the Python class iterates over the ids twice

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes `ids`."""
        kept = [number for number in ids if number not in self._hidden]
        if self._backend is not None:
            return str(self._backend.decode(kept, skip_special_tokens=False))
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def structural_ids(tokenizer: PreTrainedTokenizerBase, shown: Collection[str] = ()) -> frozenset[int]:
    """Returns the ids of special tokens that are neither tags that a model writes on purpose nor in `shown`."""
    special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens)
    return frozenset(number for number, token in special if not _TAG.fullmatch(token) and token not in shown)


def common_beginning(a: Sequence[object], b: Sequence[object]) -> int:
    """Returns the length of the longest common prefix of two strings or lists of ids. Bisects, since comparing slices is far
    faster than comparing elements."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
