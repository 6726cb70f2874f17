"""`IncrementalRenderer`: renders the messages that follow an assistant turn, and encodes them; `TemplateCapabilities`: which
messages a template can render there.

A short stub conversation is rendered with the new messages, and the text after the stub's end of turn is kept: the cost
depends on the new messages only, however long the rollout is.

Invariant: the text always comes from the template, rendered for exactly these messages, in which control tokens that a text
spells out are cut (`control`); a template that drops a content, in whole or in part, is an error. The ids are those of the
whole conversation because the boundary is a special token; `check` tests that. Which of them are a content's is found by
searching the text between its control tokens, for the label only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from etude.chat.control import CUT, ControlTokens
from etude.chat.encoding import Encoder
from etude.chat.placeholders import IMAGE_PROBE, Placeholders
from etude.chat.provenance import ContentSpan, Run, label_runs
from etude.chat.rendering import STAND_IN, Message, Renderer, clean_message, plain_message, texts_of, with_texts
from etude.chat.turns import ANCHOR, PROBE, USER_STUB, Stub, TurnEnd, Turns
from etude.errors import ConfigError
from etude.trajectory import Provenance

_UNWRITTEN = "the chat template cannot render these messages"
_EDGE = "qzxv"


def owner_of(message: Message) -> Provenance:
    """Returns the provenance of a tool or user message's content."""
    return Provenance.TOOL if message.get("role") == "tool" else Provenance.USER


class IncrementalRenderer:
    """The incremental renderer of one template, whose turn ends are `turns`; contents never produce a token of `control`."""

    def __init__(self, renderer: Renderer, encoder: Encoder, turns: Turns, control: ControlTokens) -> None:
        self._renderer, self._encoder, self._turns, self._control = renderer, encoder, turns, control

    def runs(self, stub: Stub, messages: Sequence[Message]) -> list[Run]:
        """Encodes `messages` and a generation prompt, as they follow the end of the stub turn.

        Raises:
            ConfigError: the template rejects the messages, drops a content, or completes a control token that one begins.
        """
        answers = self._control.cut([clean_message(message) for message in stub.answers_to(messages)])
        if any(self._control.spelled("".join(texts_of(answer))) for answer in answers):
            raise ConfigError(f"{_UNWRITTEN}: parts of one content spell out a control token together")
        end = self._turns.end(stub, str(messages[0].get("role")))
        text = self._tail(stub, answers, end)
        spans = self._locate(stub, answers, end, text)
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
        return label_runs(ids, offsets, spans)

    def text(self, stub: Stub, messages: Sequence[Message], first: Message = USER_STUB) -> str:
        """Returns the text that `runs` encodes, in a conversation that begins with `first`.

        Raises:
            ConfigError: the template rejects the messages.
        """
        return self._tail(stub, stub.answers_to(messages), self._turns.end(stub, str(messages[0].get("role"))), first)

    def whole(self, stub: Stub, messages: Sequence[Message]) -> list[int]:
        """Renders and encodes the stub conversation and `messages` as a whole.

        Raises:
            ConfigError: the template rejects them.
        """
        answers = [plain_message(message) for message in stub.answers_to(messages)]
        return self._encoder.ids(self._renderer.stub_text([*stub.before(answers), *answers], generate=True))

    def check(self, stub: Stub, messages: Sequence[Message]) -> None:
        """Checks, for messages that have `PROBE` as their text, that the template writes each once, that `whole` ends with
        the ids of `runs`, and that these contain nothing of the stub turn.

        Raises:
            ConfigError: the check fails, or the template rejects the messages.
        """
        if self.text(stub, messages).count(PROBE) != len(messages):
            raise ConfigError(f"{_UNWRITTEN}: it does not write the content of every message exactly once")
        end = self._turns.end(stub, str(messages[0].get("role")))
        tail = [end.id, *(number for ids, _ in self.runs(stub, messages) for number in ids)]
        if self.whole(stub, messages)[-len(tail) :] != tail:
            raise ConfigError("a token of this tokenizer reaches across the end of an assistant turn")
        if ANCHOR in self._renderer.tokenizer.decode(tail):
            raise ConfigError("the chat template writes the token that ends a turn inside a turn")

    def _tail(self, stub: Stub, answers: Sequence[Message], end: TurnEnd, first: Message = USER_STUB) -> str:
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

    def _locate(self, stub: Stub, answers: Sequence[Message], end: TurnEnd, text: str) -> list[ContentSpan]:
        """Returns where the contents stand in `text`, verbatim, trimmed, or as a JSON string; one that the template changes
        in another way has no place.

        Raises:
            ConfigError: the template drops the beginning or the end of a content, or completes a control token there.
        """
        contents = [(content, owner_of(answer)) for answer in answers for content in texts_of(answer)]
        gaps, spans, position = self._control.gaps(text), list[ContentSpan](), 0
        for number, (content, owner) in enumerate(contents):
            words = content.strip()
            texts = (content, words)
            forms = [form for each in texts for form in (each, json.dumps(each, ensure_ascii=False)[1:-1])]
            found = (
                next((span for form in forms if (span := _find(text, form, position, gaps))), None) if words else None
            )
            if found is not None:
                spans.append(ContentSpan(*found, owner))
                position = found[1]
                continue
            for edged in (f"{_EDGE} {words}", f"{words} {_EDGE}") if words else ():
                filled = [edged if n == number else each for n, (each, _) in enumerate(contents)]
                tail = self._tail(stub, with_texts(answers, filled), end)
                if _EDGE not in tail or len(self._control.gaps(tail)) != len(gaps):
                    raise ConfigError(f"{_UNWRITTEN}: it does not write the whole content of every message as it is")
        return spans


def _find(text: str, form: str, position: int, gaps: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Returns the first place of `form` from `position` on that lies in one of the `gaps`, between control tokens."""
    for begin, end in gaps:
        if end > position and (start := text.find(form, max(begin, position), end)) >= 0:
            return start, start + len(form)
    return None


_USER: Message = {"role": "user", "content": PROBE}
_TOOL: Message = {"role": "tool", "content": PROBE}


@dataclass(frozen=True)
class TemplateCapabilities:
    """The capabilities of one template.

    Attributes:
        repeats_users: whether it supports consecutive user messages.
        tool_stub: the stub turn after which it renders tool messages; None if it renders none.
        tool_problem: why it renders no tool messages, or not two in a row.
        needs_tool_names: whether the rendering of a tool message depends on the function's name.
        image_roles: roles of messages that may have images.
    """

    repeats_users: bool
    tool_stub: Stub | None
    tool_problem: str
    needs_tool_names: bool
    image_roles: frozenset[str]

    @classmethod
    def of(cls, incremental: IncrementalRenderer, images: Placeholders | None) -> TemplateCapabilities:
        """Tests one template; `images` is None for a text model.

        Raises:
            ConfigError: it cannot render a user message after an assistant turn.
        """
        incremental.check(Stub.ANSWER, [_USER])
        tool_stub, problem = _tool_stub(incremental)
        needs_tool_names = tool_stub is not None and _shows_names(incremental, tool_stub)
        image_roles: list[str] = []
        if images is not None:
            stubs = [("user", Stub.ANSWER), ("tool", tool_stub)]
            image_roles = [
                role for role, stub in stubs if stub is not None and _shows_images(incremental, images, stub, role)
            ]
        return cls(_repeats_users(incremental), tool_stub, problem, needs_tool_names, frozenset(image_roles))


def _repeats_users(incremental: IncrementalRenderer) -> bool:
    try:
        incremental.check(Stub.ANSWER, [_USER, _USER])
    except ConfigError:
        return False
    return True


def _tool_stub(incremental: IncrementalRenderer) -> tuple[Stub | None, str]:
    """Returns the stub turn after which tool messages can be rendered, preferably two in a row, or None with the reason.

    Some templates require a separate call for each tool message, some render at most one call, others none.
    """
    supported, reason = None, ""
    for stub in (Stub.CALLS, Stub.CALL, Stub.ANSWER):
        try:
            incremental.check(stub, [_TOOL])
            supported = supported or stub
            incremental.check(stub, [_TOOL, _TOOL])
        except ConfigError as error:
            reason = str(error)
            continue
        return stub, reason
    return supported, reason


def _shows_names(incremental: IncrementalRenderer, stub: Stub) -> bool:
    texts = []
    for name in ({}, {"name": "one"}, {"name": "two"}):
        try:
            runs = incremental.runs(stub, [{**_TOOL, **name}])
        except ConfigError:
            return False
        texts.append([number for ids, _ in runs for number in ids])
    return texts[0] != texts[1] or texts[1] != texts[2]


def _shows_images(incremental: IncrementalRenderer, images: Placeholders, stub: Stub, role: str) -> bool:
    """Whether messages of `role` may have images: after a turn, their ids are those of the whole conversation, and do not
    depend on earlier images (a template may number images)."""
    message = {"role": role, "content": IMAGE_PROBE}
    try:
        incremental.check(stub, [message])
        runs = incremental.runs(stub, [message])
        before = [USER_STUB, {"role": "user", "content": IMAGE_PROBE}]
        texts = {incremental.text(stub, [message], first) for first in before}
    except ConfigError:
        return False
    return len(texts) == 1 and sum(ids.count(images.id) for ids, _ in runs) == 1
