"""`DemonstrationTurns`: encodes an assistant message as the ids that a policy would have sampled for it.

Invariant: after the generation prompt's ids, these are the template's ids for the message, up to the token at which the
policy stops; a policy can sample them there, since none merges with text before it. Image tokens are not among them: one
that the message spells out is encoded as ordinary characters (`placeholders`).
"""

from __future__ import annotations

import re

from etude.chat.control import CUT
from etude.chat.encoding import Encoder, common_beginning
from etude.chat.placeholders import Placeholders
from etude.chat.rendering import Message, Renderer, plain_message
from etude.chat.turns import ANCHOR, USER_STUB, Stub, TurnEnd, Turns
from etude.errors import ConfigError, DataError

_THOUGHT_TAGS = re.compile(r"(?i)</?\|?(?:\w+:)?(?:start_|end_)?think(?:ing)?\|?>|\[/?think\]|\s")


class DemonstrationTurns:
    """Encodes assistant messages with one template, whose turn ends are `turns`; `images` is None for a text model."""

    def __init__(self, renderer: Renderer, encoder: Encoder, turns: Turns, images: Placeholders | None) -> None:
        self._renderer, self._encoder, self._turns, self._images = renderer, encoder, turns, images

    def ids(self, message: Message, end: TurnEnd) -> list[int]:
        """Returns the ids of `message`, end of turn included; `end` is the end of a turn that another message follows.

        Raises:
            DataError: the template rejects the message, or does not write it after its generation prompt; or the message has
                images.
        """
        if self._images is not None:
            message = self._images.texts.cut(plain_message(message))
        tools = self._renderer.stand_in_for([message])
        head = self._renderer.text_of_row([USER_STUB], tools, generate=True)
        whole = self._renderer.text_of_row([USER_STUB, message], tools, generate=False)
        if not whole.startswith(head):
            raise DataError("the chat template does not write this assistant message after its generation prompt")
        first, *rest = self._turns.as_sampled(whole, len(head), end).split(CUT)
        start, ids = self._encoder.ids(head), self._encoder.ids(first)
        before = self._turns.answered.text
        # Else the first words merged with the generation prompt, which a policy cannot sample: encode them separately.
        written = (
            ids[len(start) :] if ids[: len(start)] == start else self._encoder.ids_after(before, first[len(head) :])[0]
        )
        written += [number for piece in rest for number in self._encoder.ids_after(before, piece)[0]]
        if self._images is not None and self._images.id in written:
            raise DataError("an assistant message has an image: a model writes none")
        return written

    def check(self) -> None:
        """Checks that the generation prompt ends where the template begins an assistant's text.

        The prompt may end before that point or after it (a reasoning block that the template opens and closes itself), or
        open a reasoning block that a turn without reasoning closes first. Ids are compared only if it ends exactly there.

        Raises:
            ConfigError: it ends elsewhere, or a token spans the start of the text.
        """
        stub = Stub.ANSWER.conversation()
        bare, head = (self._renderer.stub_text([USER_STUB], generate=flag) for flag in (False, True))
        whole = self._renderer.stub_text(stub, generate=False)
        lead, _, _ = whole.partition(ANCHOR)
        end = self._turns.answered
        if lead == head:
            parts = self._encoder.ids(head) + self.ids(stub[1], end)
            if self._encoder.ids(self._turns.as_sampled(whole, len(head), end)) != parts:
                raise ConfigError("a token of this tokenizer reaches across the start of an assistant turn")
        elif not head.startswith(lead):
            prompted = head != bare or self._always_adds_prompt()
            written, begun = (_THOUGHT_TAGS.sub("", text) for text in (lead, head))
            if not prompted or not written.startswith(begun):
                raise ConfigError("the chat template's generation prompt is not how it begins an assistant turn")

    def _always_adds_prompt(self) -> bool:
        """Whether the template writes a generation prompt unasked: after the last user message, it writes another token
        than between two user messages."""
        first, last = "First question.", "Second question."
        try:
            text = self._renderer.stub_text([{"role": "user", "content": c} for c in (first, last)], generate=False)
        except ConfigError:  # cannot be tested
            return False
        followed, _, after = text.partition(first)[2].partition(last)
        if not self._turns.has_token(followed, beyond=0):  # the template merges the two messages
            return False
        return self._turns.has_token(after, beyond=common_beginning(followed, after))
