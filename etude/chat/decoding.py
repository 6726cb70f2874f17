"""Token ids to the text that parsers, scorers and readers see.

Invariant: structural special tokens (ends of turns, padding) vanish; the tags a model writes on purpose (tool calls,
tool responses, thoughts) stay, also under a tokenizer that declares them special. Decoded text is for reading: no id
sequence is ever made from it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from etude.chat.encoding import plain_backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAG = re.compile(r"</?(?:tool_call|tool_response|tool_calls|think)>")


_shared: WeakKeyDictionary[PreTrainedTokenizerBase, dict[frozenset[int], Decoder]] = WeakKeyDictionary()


class Decoder:
    """Decodes with one tokenizer and knows its last text: a turn is read by several, one after the other."""

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, shown: Collection[str] = ()) -> Decoder:
        """The one of this tokenizer in whose texts the special tokens among `shown` stay, too."""
        special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens)
        hidden = frozenset(number for number, token in special if not _TAG.fullmatch(token) and token not in shown)
        known = _shared.setdefault(tokenizer, {})
        if hidden not in known:
            known[hidden] = Decoder(tokenizer, hidden)
        return known[hidden]

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hidden: frozenset[int]) -> None:
        self._tokenizer = ref(tokenizer)
        self._backend = plain_backend(tokenizer, "decode", "_decode")  # the Python class walks every id twice
        self._hidden = hidden
        self._last: tuple[list[int], str] = ([], "")

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """What it decodes with, as long as that lives."""
        return self._tokenizer()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without structural special tokens."""
        last, text = self._last
        if last == ids:
            return text
        hidden = self._hidden
        kept = [number for number in ids if number not in hidden]
        tokenizer = self._tokenizer()
        assert tokenizer is not None
        if self._backend is not None:
            text = str(self._backend.decode(kept, skip_special_tokens=False))
        else:
            text = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._last = (list(ids), text)
        return text
