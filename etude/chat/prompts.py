"""`Prompts`: the messages and tools of a row to the ids that a rollout begins with.

Invariant: the ids are those of the rendered prompt encoded at once. A prompt is encoded in two parts, the first of them
cached, only if for a probe the parts' ids are those of the whole. Prompts are trusted as part of the dataset: a control
token that is spelled out in one becomes that token, except those of images (`placeholders`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etude.chat.cache import LRUCache, rendering_key
from etude.chat.contents import Message
from etude.chat.encoding import Encoder
from etude.chat.placeholders import CUT, Placeholders
from etude.chat.rendering import Renderer
from etude.chat.turns import USER_STUB, Stub, TurnEnd
from etude.errors import ConfigError, DataError

PROMPTS_KEPT = 256
_HEADS_KEPT = 16


class Prompts:
    """Prompts of one template, in which turns end with `end`; `images` is None for a text model."""

    def __init__(self, renderer: Renderer, encoder: Encoder, end: TurnEnd, images: Placeholders | None) -> None:
        self._renderer, self._encoder, self._end, self._images = renderer, encoder, end, images
        self.kept = LRUCache[tuple[int, ...]](PROMPTS_KEPT)
        self._heads = LRUCache[list[int]](_HEADS_KEPT)
        self.splits = self._can_split()

    def ids(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, image_tokens: Sequence[int]
    ) -> list[int]:
        """As `ChatTemplate.initial_ids`."""
        if self._images is None and image_tokens:
            raise DataError("a text model takes no images")
        key = rendering_key(messages, tools)
        found = self.kept.get(key)
        if found is None:
            if self._images is not None:
                messages, tools = self._images.guard(messages), self._images.guard_tools(tools or ())
            text = self._renderer.text_of_row(messages, tools, generate=True)
            first, *rest = [text] if self._images is None else text.split(CUT)
            found = (*self._encoded(first), *(n for piece in rest for n in self._end.encoder.ids(piece)))
            self.kept.put(key, found)
        return list(found) if self._images is None else self._images.expand(found, image_tokens)

    def _encoded(self, text: str) -> list[int]:
        """The ids of a text that begins a prompt. The part before its first end of turn, usually the system message and the
        tools, is the same in most rows and encoded once."""
        head, stop, rest = text.partition(self._end.text)
        if not self.splits or not stop:
            return self._encoder.ids(text)
        found = self._heads.get(head)
        if found is None:
            found = self._encoder.ids(head + stop)
            self._heads.put(head, found)
        return [*found, *self._end.encoder.ids(rest)]

    def _can_split(self) -> bool:
        """Whether a prompt may be encoded in two parts that meet after an end of turn."""
        try:
            text = self._renderer.stub_text([*Stub.ANSWER.before(()), USER_STUB], generate=True)
        except ConfigError:
            return False
        head, stop, rest = text.partition(self._end.text)
        parts = [*self._encoder.ids(head + stop), *self._end.encoder.ids(rest)]
        return bool(stop) and parts == self._encoder.ids(text)
