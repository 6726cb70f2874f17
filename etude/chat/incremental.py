"""`IncrementalRenderer`: renders the messages that follow an assistant turn, and locates their contents in the text.

A short stub conversation is rendered with the new messages, and the text after the stub's end of turn is kept: the cost
depends on the new messages only, however long the rollout is. The text that the template writes *around* contents, the
glue, is cached by the messages' shape (everything but their texts), from one rendering with probes as contents. If glue and
contents concatenate to the rendered text, contents are in it verbatim. If not (the template trims, escapes or inspects a
content), each content is rendered once more between marks.

Invariant: the text always comes from the template, rendered for exactly these messages; only the positions of contents are
inferred, and a content whose position is ambiguous is an error. The ids are those of the whole conversation because the
boundary is a special token; `check` tests that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import repeat

from etude.chat.cache import LRUCache
from etude.chat.contents import CLOSE, OPEN, Message, around, clean_message, texts_of, with_texts
from etude.chat.encoding import Encoder
from etude.chat.provenance import ContentSpan, Run
from etude.chat.rendering import STAND_IN, Renderer
from etude.chat.turns import ANCHOR, USER_STUB, Stub, Turns
from etude.errors import ConfigError
from etude.trajectory import Provenance

_UNWRITTEN = "the chat template cannot render these messages"
_SHAPES_KEPT = 64

Place = tuple[int, int]
"""Character range [start, end) of a text."""


def owner_of(message: Message) -> Provenance:
    """Returns the provenance of a tool or user message's content."""
    return Provenance.TOOL if message.get("role") == "tool" else Provenance.USER


class IncrementalRenderer:
    """The incremental renderer of one template, whose turn ends are `turns`."""

    def __init__(self, renderer: Renderer, encoder: Encoder, turns: Turns) -> None:
        self._renderer, self._encoder, self._turns = renderer, encoder, turns
        self._glue = LRUCache[list[str]](_SHAPES_KEPT)

    def runs(self, stub: Stub, messages: Sequence[Message]) -> list[Run]:
        """Encodes `messages` and a generation prompt, as they follow the end of the stub turn.

        No control token comes from a message's content (see `provenance`).

        Raises:
            ConfigError: the template rejects the messages, or does not write each content exactly once.
        """
        answers = [clean_message(message) for message in stub.answers_to(messages)]
        text = self._tail(stub, answers)
        owners = [owner_of(answer) for answer in answers for _ in texts_of(answer)]
        spans = [ContentSpan(*place, owner) for place, owner in zip(self._locate(stub, answers, text), owners) if place]
        return self._turns.end(stub, str(messages[0].get("role"))).encoder.runs(text, spans)

    def text(self, stub: Stub, messages: Sequence[Message], first: Message = USER_STUB) -> str:
        """Returns the text that `runs` encodes, in a conversation that begins with `first`.

        Raises:
            ConfigError: the template rejects the messages.
        """
        return self._tail(stub, stub.answers_to(messages), first)

    def whole(self, stub: Stub, messages: Sequence[Message]) -> list[int]:
        """Renders and encodes the stub conversation and `messages` as a whole.

        Raises:
            ConfigError: the template rejects them.
        """
        answers = stub.answers_to(messages)
        return self._encoder.ids(self._renderer.stub_text([*stub.before(answers), *answers], generate=True))

    def check(self, stub: Stub, messages: Sequence[Message]) -> None:
        """Checks that `whole` ends with the ids of `runs`, and that these contain nothing of the stub turn.

        Raises:
            ConfigError: the check fails, or the template rejects the messages.
        """
        end = self._turns.end(stub, str(messages[0].get("role")))
        tail = [end.id, *(number for ids, _ in self.runs(stub, messages) for number in ids)]
        if self.whole(stub, messages)[-len(tail) :] != tail:
            raise ConfigError("a token of this tokenizer reaches across the end of an assistant turn")
        if ANCHOR in self._renderer.tokenizer.decode(tail):
            raise ConfigError("the chat template writes the token that ends a turn inside a turn")

    def _tail(self, stub: Stub, answers: Sequence[Message], first: Message = USER_STUB) -> str:
        end = self._turns.end(stub, str(answers[0].get("role")))
        rendered = self._renderer.stub_text([first, *stub.before(answers)[1:], *answers], generate=True)
        # The stub comes before all contents, so the first anchor and the first end of turn after it are the stub's.
        anchor = rendered.find(ANCHOR)
        turn_end = rendered.find(end.text, anchor)
        if min(anchor, turn_end) < 0:
            raise ConfigError(f"{_UNWRITTEN}: it does not write the turn before them")
        tail = rendered[turn_end + len(end.text) :]
        if STAND_IN in tail:
            raise ConfigError(f"{_UNWRITTEN}: it lists the tools again after a turn")
        return tail

    def _locate(self, stub: Stub, answers: Sequence[Message], text: str) -> list[Place | None]:
        """Locates each text of the messages in `text`, the rendered tail; None for a blank one that is not verbatim."""
        contents = [content for answer in answers for content in texts_of(answer)]
        places: list[Place | None] = []
        written = ""
        for glue, content in zip(self._glue_of(stub, answers, len(contents)), [*contents, ""]):
            written += glue
            places.append((len(written), len(written) + len(content)))
            written += content
        if written == text:
            return places[:-1]
        places = [self._locate_by_marks(stub, answers, contents, n, text) for n in range(len(contents))]
        return _fill_missing([content.strip() for content in contents], places, text)

    def _glue_of(self, stub: Stub, answers: Sequence[Message], count: int) -> list[str]:
        """Returns the text before, between and after the `count` contents of messages of this shape; empty if the template
        does not write each content exactly once."""
        shape = f"{stub.value} {with_texts(answers, repeat(''))}"
        glue = self._glue.get(shape)
        if glue is None:
            glue, probes = [], [f"Words of probe number {n}." for n in range(count)]
            try:
                rest = self._tail(stub, with_texts(answers, probes))
            except ConfigError:  # the template may still accept the actual contents
                rest = ""
            if all(rest.count(probe) == 1 for probe in probes):
                for probe in probes:
                    before, _, rest = rest.partition(probe)
                    glue.append(before)
                glue.append(rest)
            self._glue.put(shape, glue)
        return glue

    def _locate_by_marks(
        self, stub: Stub, answers: Sequence[Message], contents: Sequence[str], number: int, text: str
    ) -> Place | None:
        """Locates a content by rendering it between marks; None if it is blank, or if the marks change the text."""
        lead, words, trail = around(contents[number])
        if not words:
            return None
        filling = [*contents[:number], f"{lead}{OPEN}{words}{CLOSE}{trail}", *contents[number + 1 :]]
        before, *more = self._tail(stub, with_texts(answers, filling)).split(OPEN)
        within, *after = more[0].split(CLOSE) if len(more) == 1 else [""]
        if len(after) != 1:
            raise ConfigError(f"{_UNWRITTEN}: it does not write the content of every message exactly once")
        if f"{before}{within}{after[0]}" != text:  # the template inspects how the content begins or ends
            return None
        # White space that the template kept around the words, verbatim or JSON-escaped, is part of the content.
        leads = (len(each) for each in (lead, _escape(lead)) if before.endswith(each))
        trails = (len(each) for each in (trail, _escape(trail)) if after[0].startswith(each))
        return len(before) - next(leads, 0), len(before) + len(within) + next(trails, 0)


def _escape(space: str) -> str:
    return json.dumps(space, ensure_ascii=False)[1:-1]


def _fill_missing(words: Sequence[str], places: Sequence[Place | None], text: str) -> list[Place | None]:
    """Fills in missing places by searching `text` for the words, in order; blank words keep None.

    Raises:
        ConfigError: the words are not in `text` in this order, or their positions are ambiguous.
    """
    known = [n for n, each in enumerate(words) if each]
    starts, position = [], 0
    for n in known:
        place = places[n]
        starts.append(place[0] if place else text.find(words[n], position))
        position = place[1] if place else starts[-1] + len(words[n])
    from_end, position = [], len(text)
    for n in reversed(known):
        place = places[n]
        position = place[0] if place else text.rfind(words[n], 0, position)
        from_end.append(position)
    if starts != from_end[::-1] or -1 in starts:
        raise ConfigError(f"{_UNWRITTEN}: it does not write the content of every message exactly once")
    found = dict(zip(known, starts))
    return [place or ((found[n], found[n] + len(words[n])) if n in found else None) for n, place in enumerate(places)]
