"""`Prompts`: the messages and tools of a row to the ids that a rollout begins with.

Invariant: the ids are those of the rendered prompt encoded at once. A prompt is encoded in two parts, of which the first is
kept, only where the parts' ids are those of the whole for a probe. Prompts are the data set's own: a control token that is
spelled out in one becomes that token, but for those of images (`placeholders`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from etude.chat.contents import Message
from etude.chat.encoding import Encoder
from etude.chat.forms import Forms
from etude.chat.placeholders import CUT, Placeholders
from etude.chat.recent import Recent, rendering_key
from etude.chat.rendering import Renderer
from etude.chat.symbolic import Form
from etude.chat.turns import USER_STUB, Stub, TurnEnd
from etude.errors import ConfigError, DataError

_TOOLS = json.JSONEncoder(default=repr)
PROMPTS_KEPT = 256
_HEADS_KEPT = 16


class Prompts:
    """Prompts of one template, in which turns end with `end`; `images` is None for a text model."""

    def __init__(self, renderer: Renderer, encoder: Encoder, end: TurnEnd, images: Placeholders | None) -> None:
        self._renderer, self._encoder, self._end, self._images = renderer, encoder, end, images
        self.forms = Forms[Form](renderer, lambda form, _: form, waits=True)
        self.kept = Recent[tuple[int, ...]](PROMPTS_KEPT)
        self._heads = Recent[list[int]](_HEADS_KEPT)
        self.splits = self._can_split()

    def ids(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, image_tokens: Sequence[int]
    ) -> list[int]:
        """As `ChatTemplate.initial_ids`."""
        if self._images is not None:
            messages = self._images.guarded(messages)
        elif image_tokens:
            raise DataError("a text model is shown no images")
        tools_key = _TOOLS.encode(tools) if tools else ""
        key = rendering_key(messages, tools_key)
        found = self.kept.get(key)
        if found is None:
            if tools and self._images is not None:
                tools = self._images.guarded_tools(tools)
            formed = self.forms.find(messages, (tools_key,), tools=tools)
            text = formed[0].filled(formed[1]) if formed else self._renderer.text_of_row(messages, tools, generate=True)
            found = tuple(self._encoded(text))
            self.kept.put(key, found)
        return list(found) if self._images is None else self._images.expanded(found, image_tokens)

    def _encoded(self, text: str) -> list[int]:
        """The ids of a rendered prompt. What stands before its first end of turn, usually the system message and the
        tools, is the same in most rows: it is encoded once."""
        if self._images is not None and CUT in text:
            first, *rest = text.split(CUT)
            return [*self._encoded(first), *(n for piece in rest for n in self._end.encoder.ids(piece))]
        cut = self._behind_first_turn(text)
        if not self.splits or not cut:
            return self._encoder.ids(text)
        head = (text[:cut],)
        found = self._heads.get(head)
        if found is None:
            found = self._encoder.ids(text[:cut])
            self._heads.put(head, found)
        return [*found, *self._end.encoder.ids(text[cut:])]

    def _behind_first_turn(self, text: str) -> int:
        """Where the first end of turn in `text` stops; 0 where there is none."""
        start = text.find(self._end.text)
        return start + len(self._end.text) if start >= 0 else 0

    def _can_split(self) -> bool:
        """Whether a prompt may be encoded in two parts that meet behind an end of turn, as its parts' ids suggest."""
        try:
            text = self._renderer.stub_text([*Stub.ANSWER.before(()), USER_STUB], generate=True)
        except ConfigError:
            return False
        cut = self._behind_first_turn(text)
        parts = [*self._encoder.ids(text[:cut]), *self._end.encoder.ids(text[cut:])]
        return cut > 0 and parts == self._encoder.ids(text)
