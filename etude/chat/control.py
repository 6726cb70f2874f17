"""`ControlTokens`: the tokens that only the template or the policy may write, and what keeps them out of others' text.

These are all special tokens, and all other added tokens that the template itself writes, such as a tool-response tag. A text
that spells one out stays plain characters: `cut` marks a place inside the spelled-out token in the messages before the
template is rendered, and the rendered text is encoded in pieces, split there. So no place of a content in the rendered text
has to be known, whatever the template does to it. Where the text becomes part of a trusted prompt, `disarm` changes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
CUT = "\ufdd2"
"""A Unicode noncharacter, which no text may contain; marks where a spelled-out token is to be split."""


class TokenTexts:
    """Texts of tokens that a text of others must not become."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts)
        longest_first = sorted(self.texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spelled(self, text: str) -> list[str]:
        """Returns the tokens that `text` spells out, in order."""
        return self._pattern.findall(text)

    def gaps(self, text: str) -> list[tuple[int, int]]:
        """Returns the ranges of `text` before, between and after the tokens that it spells out."""
        found = [0, *(place for token in self._pattern.finditer(text) for place in token.span()), len(text)]
        return list(zip(found[::2], found[1::2]))

    def disarm(self, value: T) -> T:
        """Puts a zero-width space inside every token that a string in `value` spells out, at any depth."""
        return self.cut(value, "\u200b")

    def cut(self, value: Any, mark: str = CUT) -> Any:
        """Puts a mark inside every token that a string in `value` spells out, at any depth."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", value.replace(CUT, "\ufffd"))
        if isinstance(value, Mapping):
            return {self.cut(key, mark): self.cut(each, mark) for key, each in value.items()}
        return [self.cut(each, mark) for each in value] if isinstance(value, list | tuple) else value


class ControlTokens(TokenTexts):
    """The control tokens of one tokenizer and its template, as `ids` and as `texts`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.ids = control_ids(tokenizer)
        super().__init__(tokenizer.convert_ids_to_tokens(sorted(self.ids)))


def control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the ids of a tokenizer's control tokens."""
    template = tokenizer.chat_template or ""
    source = template if isinstance(template, str) else "\n".join(template.values())
    control = {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or (token.content.strip() and token.content in source)
    } | set(tokenizer.all_special_ids)
    # The unk token is not a control token, unless it is also eos, bos or pad.
    if tokenizer.unk_token_id not in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        control.discard(tokenizer.unk_token_id)
    return frozenset(control)
