"""Text to token ids, one text at a time.

Invariant: the ids and offsets are those of `tokenizer(text, add_special_tokens=False)`. Where the tokenizer's class does
nothing of its own, its Rust backend is asked directly: a call through the Python class costs several times as much, and
its batch call wakes a pool of threads for a single short text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def plain_backend(tokenizer: PreTrainedTokenizerBase, *methods: str) -> Any:
    """The Rust tokenizer behind a fast one, or None where its class (or a user's) has its own idea of `methods`."""
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
        """The ids of `text`."""
        backend = self._ready()
        if backend is not None:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
            return ids
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `text`, and where in it (characters, start and end) each stands."""
        backend = self._ready()
        if backend is not None:
            encoded = backend.encode(text, add_special_tokens=False)
            return encoded.ids, encoded.offsets
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(found["input_ids"]), list(found["offset_mapping"])

    def _ready(self) -> Any:
        """The backend, unless another caller switched on padding or truncation, which would change ids."""
        backend = self._backend
        return None if backend is None or backend.padding is not None or backend.truncation is not None else backend


def common_beginning(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common beginning of two texts, or of two lists of ids."""
    shortest = min(len(a), len(b))
    if a[:shortest] == b[:shortest]:
        return shortest
    return next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
