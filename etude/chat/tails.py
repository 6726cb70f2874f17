"""`Tails`: what a template writes behind the end of a stub turn, rendered each time.

What follows an assistant turn is rendered by difference: a fixed stub conversation is rendered with the new messages, and
everything behind the stub's end of turn is encoded by itself.

Invariant: no control token comes out of a message's content (`labelled`), which is found between marks (`contents`). That
the ids are those that encoding the whole conversation gives is so because the boundary is a special token, and is tried by
`check`. Sparing renderings is left to `contexts`.
"""

from __future__ import annotations

from collections.abc import Sequence

from etude.chat.contents import Message, mark, unmark
from etude.chat.encoding import Encoder
from etude.chat.labelled import Owned, Run
from etude.chat.rendering import STAND_IN, Renderer
from etude.chat.turns import ANCHOR, USER_STUB, Stub, TurnEnd, Turns
from etude.errors import ConfigError, one_line
from etude.trajectory import Provenance

_UNWRITTEN = "the chat template cannot render these messages"


def owner_of(message: Message) -> Provenance:
    """Whose the content of a tool or user message is."""
    return Provenance.TOOL if message.get("role") == "tool" else Provenance.USER


class Tails:
    """Those of one template, whose turns end as `turns` says."""

    def __init__(self, renderer: Renderer, encoder: Encoder, turns: Turns) -> None:
        self._renderer, self._encoder, self._turns = renderer, encoder, turns

    def runs(self, stub: Stub, messages: Sequence[Message]) -> list[Run]:
        """Ids that follow the end of the stub turn when `messages` and a generation prompt come next.

        Raises:
            ConfigError: the template refuses the messages, or does not write each content exactly once.
        """
        answers = stub.answers_to(messages)
        marked = [mark(message) for message in answers]
        end = self._turns.end(stub, str(messages[0].get("role")))
        rendered = self._behind(end, [*stub.before(answers), *(entry.message for entry in marked)])
        try:
            text, spans = unmark(rendered, marked)
        except ValueError as error:
            raise ConfigError(f"{_UNWRITTEN}: {one_line(error)}") from error
        return end.encoder.runs(text, [Owned(s.start, s.end, owner_of(messages[s.message])) for s in spans])

    def text(self, stub: Stub, messages: Sequence[Message], first: Message = USER_STUB) -> str:
        """The text of what `runs` encodes, in a conversation that begins with `first`.

        Raises:
            ConfigError: the template refuses the messages.
        """
        answers = stub.answers_to(messages)
        end = self._turns.end(stub, str(messages[0].get("role")))
        return self._behind(end, [first, *stub.before(answers)[1:], *answers])

    def _behind(self, end: TurnEnd, conversation: Sequence[Message]) -> str:
        """What the template writes behind the end of the stub turn in `conversation`."""
        rendered = self._renderer.stub_text(conversation, generate=True)
        # The stub comes before any content, so its first occurrence and the first end of turn after it are its own.
        anchor = rendered.find(ANCHOR)
        turn_end = rendered.find(end.text, anchor)
        if min(anchor, turn_end) < 0:
            raise ConfigError(f"{_UNWRITTEN}: it does not write the turn before them")
        behind = rendered[turn_end + len(end.text) :]
        if STAND_IN in behind:
            raise ConfigError(f"{_UNWRITTEN}: it lists the tools again behind a turn")
        return behind

    def whole(self, stub: Stub, messages: Sequence[Message]) -> list[int]:
        """Ids of the stub conversation and `messages`, rendered and encoded at once.

        Raises:
            ConfigError: the template refuses them.
        """
        answers = stub.answers_to(messages)
        return self._encoder.ids(self._renderer.stub_text([*stub.before(answers), *answers], generate=True))

    def check(self, stub: Stub, messages: Sequence[Message]) -> None:
        """Tries that the ids of `runs` are the last ids of the whole, and hold nothing of the stub turn.

        Raises:
            ConfigError: they are not, or the template refuses the messages.
        """
        end = self._turns.end(stub, str(messages[0].get("role")))
        tail = [end.id, *(number for ids, _ in self.runs(stub, messages) for number in ids)]
        if self.whole(stub, messages)[-len(tail) :] != tail:
            raise ConfigError("a token of this tokenizer reaches across the end of an assistant turn")
        if ANCHOR in self._renderer.tokenizer.decode(tail):
            raise ConfigError("the chat template writes the token that ends a turn inside a turn")
