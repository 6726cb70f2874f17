"""Token ids to the text that parsers, scorers and readers see.

Invariant: structural special tokens (ends of turns, padding) vanish; the tags a model writes on purpose (tool calls,
tool responses, thoughts) stay, also under a tokenizer that declares them special. Decoded text is for reading: no id
sequence is ever made from it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from etude.chat.encoding import plain_backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAG = re.compile(r"</?(?:tool_call|tool_response|tool_calls|think)>")


class Decoder:
    """Decodes with one tokenizer; special tokens among `shown` stay in the text, too."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shown: Collection[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._backend = plain_backend(tokenizer, "decode", "_decode")  # the Python class walks every id twice
        special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens)
        self._hidden = frozenset(
            number for number, token in special if not _TAG.fullmatch(token) and token not in shown
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without structural special tokens."""
        kept = [number for number in ids if number not in self._hidden]
        if self._backend is not None:
            return str(self._backend.decode(kept, skip_special_tokens=False))
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
