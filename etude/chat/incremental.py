"""`IncrementalRenderer`: renders the messages that follow an assistant turn, encodes them, and finds out which messages a
template can render there.

A short stub conversation is rendered with the new messages, and the text after the stub's end of turn is kept: the cost
depends on the new messages only, however long the rollout is.

Invariant: the text always comes from the template, rendered for exactly these messages, in which control tokens that a text
spells out are cut (`control`); a template that drops a content, in whole or in part, is an error. The ids are those of the
whole conversation because the boundary is a special token; the constructor tests that. Which of them are a content's is
found by searching the text between its control tokens, for the label only.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from etude.chat.control import CUT, ControlTokens
from etude.chat.encoding import Encoder
from etude.chat.placeholders import IMAGE_PROBE, Placeholders
from etude.chat.rendering import STAND_IN, Message, Renderer, clean_message, texts_of, with_texts
from etude.chat.turns import ANCHOR, PROBE, Stub, TurnEnd, Turns
from etude.errors import ConfigError
from etude.trajectory import Provenance, Run

_UNWRITTEN = "the chat template cannot render these messages"
_EDGE = "qzxv"
_USER: Message = {"role": "user", "content": PROBE}
_TOOL: Message = {"role": "tool", "content": PROBE}
Span = tuple[int, int, Provenance]
"""Character range [start, end) of a text that holds a message's content, and the content's provenance."""


def owner_of(message: Message) -> Provenance:
    """Returns the provenance of a tool or user message's content."""
    return Provenance.TOOL if message.get("role") == "tool" else Provenance.USER


class IncrementalRenderer:
    """The incremental renderer of one template, whose turn ends are `turns`; contents never produce a token of `control`.

    Attributes:
        repeats_users: whether the template supports consecutive user messages.
        tool_stub: the stub turn after which it renders tool messages; None if it renders none.
        tool_problem: why it renders no tool messages, or not two in a row.
        needs_tool_names: whether the rendering of a tool message depends on the function's name.
        image_roles: roles of messages that may have images.

    Raises:
        ConfigError: it cannot render a user message after an assistant turn.
    """

    def __init__(
        self,
        renderer: Renderer,
        encoder: Encoder,
        turns: Turns,
        control: ControlTokens,
        images: Placeholders | None,
    ) -> None:
        """`images` is None for a text model."""
        self._renderer, self._encoder, self._turns, self._control = renderer, encoder, turns, control
        self._check(Stub.ANSWER, [_USER])
        self.repeats_users = self._refusal(Stub.ANSWER, [_USER, _USER]) is None
        self.tool_stub, self.tool_problem = self._find_tool_stub()
        self.needs_tool_names = self.tool_stub is not None and self._shows_names(self.tool_stub)
        stubs = {"user": Stub.ANSWER, "tool": self.tool_stub}
        self.image_roles = frozenset(
            role
            for role, stub in stubs.items()
            if images is not None and stub is not None and self._shows_images(images, stub, role)
        )

    def stub_for(self, messages: Sequence[Message]) -> Stub:
        """Returns the stub turn to render before `messages`.

        Raises:
            ConfigError: the template renders no tool messages.
        """
        if not any(message.get("role") == "tool" for message in messages):
            return Stub.ANSWER
        if self.tool_stub is None:
            raise ConfigError(f"the chat template does not support the tool role: {self.tool_problem}")
        return self.tool_stub

    def runs(self, stub: Stub, messages: Sequence[Message]) -> list[Run]:
        """Encodes `messages` and a generation prompt, as they follow the end of the stub turn (`stub.conversation`: a
        question, that turn, the messages).

        Raises:
            ConfigError: the template rejects the messages, drops a content, or completes a control token that one begins.
        """
        conversation = self._control.cut([clean_message(message) for message in stub.conversation(messages)])
        if any(self._control.spelled("".join(texts_of(answer))) for answer in conversation[2:]):
            raise ConfigError(f"{_UNWRITTEN}: parts of one content spell out a control token together")
        end = self._turns.end(stub, str(messages[0].get("role")))
        text = self._tail(conversation, end)
        spans = self._locate(conversation, end, text)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        position = 0
        for piece in text.split(CUT):
            more, places = self._encoder.ids_after(end.text, piece)
            ids += more
            offsets += [(position + start, position + stop) for start, stop in places]
            position += len(piece) + 1
        if len([number for number in ids if number in self._control.ids]) > len(self._control.spelled(text)):
            raise ConfigError(f"{_UNWRITTEN}: the tokenizer makes a control token of other characters")
        return _label(ids, offsets, spans)

    def whole(self, stub: Stub, messages: Sequence[Message]) -> list[int]:
        """Renders and encodes the stub conversation and `messages` as a whole.

        Raises:
            ConfigError: the template rejects them.
        """
        return self._encoder.ids(self._renderer.stub_text(stub.conversation(messages), generate=True))

    def _tail(self, conversation: Sequence[Message], end: TurnEnd) -> str:
        """Returns the text of a stub conversation after the stub turn."""
        rendered = self._renderer.stub_text(conversation, generate=True)
        # The stub comes before all contents, so the first anchor and the first end of turn after it are the stub's.
        anchor = rendered.find(ANCHOR)
        turn_end = rendered.find(end.text, anchor)
        if min(anchor, turn_end) < 0:
            raise ConfigError(f"{_UNWRITTEN}: it does not write the turn before them")
        tail = rendered[turn_end + len(end.text) :]
        if STAND_IN in tail:
            raise ConfigError(f"{_UNWRITTEN}: it lists the tools again after a turn")
        return tail

    def _locate(self, conversation: Sequence[Message], end: TurnEnd, text: str) -> list[Span]:
        """Returns where the contents stand in `text`, verbatim, trimmed, or as a JSON string; one that the template changes
        in another way has no place.

        Raises:
            ConfigError: the template drops the beginning or the end of a content, or completes a control token there.
        """
        stub, answers = conversation[:2], conversation[2:]
        contents = [(content, owner_of(answer)) for answer in answers for content in texts_of(answer)]
        gaps, spans, position = self._control.gaps(text), list[Span](), 0
        for number, (content, owner) in enumerate(contents):
            words = content.strip()
            if not words:
                continue
            forms = [form for each in (content, words) for form in (each, json.dumps(each, ensure_ascii=False)[1:-1])]
            found = next((span for form in forms if (span := _find(text, form, position, gaps))), None)
            if found is not None:
                spans.append((*found, owner))
                position = found[1]
                continue
            for edged in (f"{_EDGE} {words}", f"{words} {_EDGE}"):
                filled = [edged if n == number else each for n, (each, _) in enumerate(contents)]
                tail = self._tail([*stub, *with_texts(answers, filled)], end)
                if _EDGE not in tail or len(self._control.gaps(tail)) != len(gaps):
                    raise ConfigError(f"{_UNWRITTEN}: it does not write the whole content of every message as it is")
        return spans

    def _check(self, stub: Stub, messages: Sequence[Message]) -> None:
        """Checks, for messages that have `PROBE` as their text, that the template writes each once, that `whole` ends with
        the ids of `runs`, and that these contain nothing of the stub turn.

        Raises:
            ConfigError: the check fails, or the template rejects the messages.
        """
        end = self._turns.end(stub, str(messages[0].get("role")))
        if self._tail(stub.conversation(messages), end).count(PROBE) != len(messages):
            raise ConfigError(f"{_UNWRITTEN}: it does not write the content of every message exactly once")
        tail = [end.id, *(number for ids, _ in self.runs(stub, messages) for number in ids)]
        if self.whole(stub, messages)[-len(tail) :] != tail:
            raise ConfigError("a token of this tokenizer reaches across the end of an assistant turn")
        if ANCHOR in self._renderer.tokenizer.decode(tail):
            raise ConfigError("the chat template writes the token that ends a turn inside a turn")

    def _refusal(self, stub: Stub, messages: Sequence[Message]) -> str | None:
        """Why `_check` fails; None if it does not."""
        try:
            self._check(stub, messages)
        except ConfigError as error:
            return str(error)
        return None

    def _find_tool_stub(self) -> tuple[Stub | None, str]:
        """Returns the stub turn after which tool messages can be rendered, preferably two in a row, or None with the reason.

        Some templates require a separate call for each tool message, some render at most one call, others none.
        """
        supported, reason = None, ""
        for stub in (Stub.CALLS, Stub.CALL, Stub.ANSWER):
            refusal = self._refusal(stub, [_TOOL])
            supported = supported or (stub if refusal is None else None)
            refusal = refusal or self._refusal(stub, [_TOOL, _TOOL])
            if refusal is None:
                return stub, reason
            reason = refusal
        return supported, reason

    def _shows_names(self, stub: Stub) -> bool:
        try:
            runs = [self.runs(stub, [{**_TOOL, **name}]) for name in ({}, {"name": "one"}, {"name": "two"})]
        except ConfigError:
            return False
        bare, one, two = ([number for ids, _ in each for number in ids] for each in runs)
        return bare != one or one != two

    def _shows_images(self, images: Placeholders, stub: Stub, role: str) -> bool:
        """Whether messages of `role` may have images: after a turn, their ids are those of the whole conversation, and do
        not depend on earlier images (a template may number images)."""
        message = {"role": role, "content": IMAGE_PROBE}
        question, *others = stub.conversation([message])
        try:
            self._check(stub, [message])
            end = self._turns.end(stub, role)
            texts = {
                self._tail([first, *others], end) for first in (question, {"role": "user", "content": IMAGE_PROBE})
            }
            runs = self.runs(stub, [message])
        except ConfigError:
            return False
        return len(texts) == 1 and sum(ids.count(images.id) for ids, _ in runs) == 1


def _find(text: str, form: str, position: int, gaps: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Returns the first place of `form` from `position` on that lies in one of the `gaps`, between control tokens."""
    for begin, end in gaps:
        if end > position and (start := text.find(form, max(begin, position), end)) >= 0:
            return start, start + len(form)
    return None


def _label(ids: list[int], offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[Run]:
    """Splits the ids of a text by provenance: a token that overlaps a span is its owner's (of two spans, the first's), all
    others are TEMPLATE.

    Args:
        offsets: (start, end) of each token in the text, sorted.
        spans: sorted, and not overlapping.
    """
    labels = [Provenance.TEMPLATE] * len(ids)
    done = 0
    for start, end, owner in spans:
        first = bisect_right(offsets, start, done, key=itemgetter(1))
        last = bisect_left(offsets, end, first, key=itemgetter(0))
        if first < last and start < end:
            labels[first:last] = [owner] * (last - first)
            done = last
    runs = groupby(zip(ids, labels), key=itemgetter(1))
    return [([number for number, _ in run], label) for label, run in runs]
