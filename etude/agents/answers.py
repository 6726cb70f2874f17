"""What tools and users say, as messages that the chat template writes.

Invariant: nothing that a model, a tool or a user says ends a run. That the template writes their messages at all is checked
at start-up (`etude.chat.check.require_answers`); there may still be contents that it takes apart, such as a tool's answer
with a `</think>` in it under a template that cuts there. A line stands in place of these, and tells the model. Answers
that leave too little room for the next turn are cut further, as long as something of each is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etude.chat import ChatTemplate
from etude.errors import ConfigError
from etude.tools import TokenLimit

LEAST_TOKENS = 16  # of a cut answer: with less, its mark would be most of it
UNWRITABLE = "(this answer cannot be shown: the chat template does not write it as it is)"


def naming(message: dict[str, Any], name: str | None) -> dict[str, Any]:
    """A tool's message that says which function it answers for, where that is known; another's as it is."""
    return {**message, "name": name} if name and message.get("role") == "tool" else message


def written(chat: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages`, `UNWRITABLE` in place of contents that the template does not write; none where that does not help."""
    told = [dict(m) if _is_written(chat, [m]) else {**m, "content": UNWRITABLE} for m in messages]
    return told if _is_written(chat, told) else []


def shortened(texts: Sequence[str], excess: int, limit: TokenLimit) -> list[str] | None:
    """`texts` in `excess` tokens fewer, the longest cut to one length; None where that is less than `LEAST_TOKENS`."""
    sizes = [limit.count(text) for text in texts]
    left, cap = sum(sizes) - excess, 0
    for shorter, size in enumerate(sorted(sizes)):
        cap = left // (len(sizes) - shorter)
        if size > cap:
            break
        left -= size
    if cap < LEAST_TOKENS:
        return None
    return [text if size <= cap else limit.cut(text, cap) for text, size in zip(texts, sizes)]


def _is_written(chat: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> bool:
    if not all(isinstance(message.get("content"), str) for message in messages):
        return False
    try:
        return bool(chat.context_ids(messages))
    except ConfigError:
        return False
