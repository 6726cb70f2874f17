"""`ControlTokens`: the tokens that only the template or the policy may write.

These are all special tokens, and all other added tokens that the template itself writes, such as a tool-response tag.
`provenance` keeps them out of contents; in prompts, the caller that inserts third-party text must do it (`disarm`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ControlTokens:
    """The control tokens of one tokenizer and its template, as `ids` and as `texts`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.ids = control_ids(tokenizer)
        self.texts = frozenset(tokenizer.convert_ids_to_tokens(sorted(self.ids)))
        longest_first = sorted(self.texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spelled(self, text: str) -> list[str]:
        """Returns the control tokens that `text` spells out, in order."""
        return self._pattern.findall(text)

    def disarm(self, text: str) -> str:
        """Puts a zero-width space inside every control token that `text` spells out."""
        return self._pattern.sub(lambda found: f"{found[0][0]}\u200b{found[0][1:]}", text)


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
