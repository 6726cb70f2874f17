"""`StopStrings`: ends a request at the token that completes one of its stop strings.

Invariant: ids are never cut: the token that completes a stop string is the last one, even if it contains more text after
it. A match that begins in the prompt does not count, and special tokens are part of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from etude.chat.encoding import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENS_PER_CHARACTER = 4  # a character has at most four bytes, a token at least one


class StopStrings:
    """Matches the stop strings `texts` of one request, none of them empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._decode = Decoder(tokenizer, frozenset()).decode
        # One token more than a stop string can have, since decoders treat the first token of a sequence differently.
        self._reach = _TOKENS_PER_CHARACTER * max(map(len, texts)) + 1

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether the last of the sampled `tokens` completes a stop string, given that none was complete before it."""
        text = self._decode(list(tokens[-self._reach :]))
        return any(each in text for each in self._texts)
