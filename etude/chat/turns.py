"""`Turns`: the token that ends an assistant turn, and the stub turns after which a rollout's new messages are rendered.

The token is found by rendering a stub turn as the last message, and again followed by another message:

    last turn is followed by    turn in a history is followed by    policy stops at     new text begins after
    a token A                   the same token A                    A                   A                       ChatML
    a token A                   another token B                     A                   B                       gpt-oss
    a token A                   the next message's first token      A                   the turn itself         (1)
    nothing                     the next message's first token      that first token    that first token        GLM

In gpt-oss, `<|return|>` becomes `<|end|>`; (1) are templates that close only the last turn. A turn with tool calls may end
with a different token than one without (gpt-oss: `<|call|>`); either token closes any turn.

Invariant: sampled ids are never changed. An end-of-turn token is inserted before the new text only if the sampled ids end
neither with it nor with one that the template would replace by it. That is the case after any other stop: a limit, an eos
that is not the template's end of turn, or the first token of a message other than the one that follows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from etude.chat.encoding import Encoder, common_beginning
from etude.chat.rendering import Message, Renderer
from etude.errors import ConfigError

ANCHOR = "Etude stub turn"
PROBE = "An answer with 42 words."
USER_STUB: Message = {"role": "user", "content": "A question."}
_UNNAMED = "unknown"  # function name for tool messages without one, in templates that write names
_CALL_ID = "stub{:05d}"  # nine letters and digits, as Mistral's templates require
_NAMES = ("name", "tool_call_id")
_PLAIN = re.compile(r"[\w.:/-]{1,128}")


class Stub(Enum):
    """A stub turn, named by its content."""

    ANSWER = "an answer"
    CALL = "one call"
    CALLS = "a call for each tool message"

    def conversation(self, messages: Sequence[Message] = ()) -> list[Message]:
        """Returns the stub conversation, a question and the turn, followed by `messages`, of which tool messages get the id
        of the stub's call that they answer, unless they have one.

        Function names and call ids come from the model and become template text, so those with unusual characters are
        dropped.
        """
        if self is Stub.ANSWER:
            return [USER_STUB, {"role": "assistant", "content": ANCHOR}, *messages]
        answers: list[Message] = []
        asked: list[Message] = []
        for message in messages:
            if message.get("role") == "tool":
                usual = {
                    key: value
                    for key, value in message.items()
                    if key not in _NAMES or (isinstance(value, str) and _PLAIN.fullmatch(value))
                }
                message = {"tool_call_id": _CALL_ID.format(len(asked) if self is Stub.CALLS else 0), **usual}
                asked.append(message)
            answers.append(message)
        asked = asked or [{"tool_call_id": _CALL_ID.format(0)}]
        calls = [
            {
                "id": message["tool_call_id"],
                "type": "function",
                "function": {"name": message.get("name", _UNNAMED), "arguments": {"text": ANCHOR}},
            }
            for message in (asked if self is Stub.CALLS else asked[:1])
        ]
        return [USER_STUB, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]


@dataclass(frozen=True)
class TurnEnd:
    """The token after which the text that follows a turn begins.

    Attributes:
        text: the token.
        lead: white space before it.
        id: its id.
        closes: whether it belongs to the turn, rather than being the first token of the next message.
        written: ids to insert if the policy did not end its turn with it.
    """

    text: str
    lead: str
    id: int
    closes: bool
    written: tuple[int, ...]


class Turns:
    """The turn ends of one template.

    Raises:
        ConfigError: the template does not write an assistant's content, or does not end it with a token.
    """

    def __init__(self, renderer: Renderer, encoder: Encoder) -> None:
        self._renderer, self._encoder = renderer, encoder
        added = renderer.tokenizer.added_tokens_decoder
        self._added = {token.content: number for number, token in added.items() if token.content.strip()}
        self._tokens = re.compile("|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) or r"(?!)")
        self._ends: dict[tuple[Stub, str], TurnEnd] = {}
        self._stops: dict[int, str | None] = {}
        self.answered = self.use(Stub.ANSWER, "user")

    @property
    def stops(self) -> tuple[int, ...]:
        """Ids with which the policy ends its turns; first that of turns without tool calls."""
        return tuple(self._stops)

    def use(self, stub: Stub, role: str) -> TurnEnd:
        """Like `end`, but also adds the token that ends such a turn to `stops`."""
        end, (own, _) = self.end(stub, role), self._closing_token(stub)
        self._stops[end.id if own is None else self._added[own]] = own
        return end

    def end(self, stub: Stub, role: str) -> TurnEnd:
        """Returns the end of a stub turn that is followed by a message of `role`.

        Raises:
            ConfigError: the template rejects the messages, or does not end the turn with a token.
        """
        if (known := self._ends.get((stub, role))) is not None:
            return known
        own, before = self._closing_token(stub)
        lead, written, rest = self._text_after_stub(stub, role)
        closes = written == own or not self._opens_next_message(stub, role, written, rest)
        ids = self._encoder.ids(f"{written}{lead}{written}")[1:] if lead and not closes else [self._added[written]]
        if stub is Stub.ANSWER and written == own:  # plus the tokens that the template writes before it
            ids = self._encoder.ids(before.lstrip() + written)
        made = self._ends[stub, role] = TurnEnd(written, lead, self._added[written], closes, tuple(ids))
        return made

    def has_token(self, text: str, *, beyond: int) -> bool:
        """Whether `text` spells out an added token that ends after index `beyond`."""
        return any(token.end() > beyond for token in self._tokens.finditer(text))

    def opening(self, end: TurnEnd, sampled: Sequence[int] | None) -> tuple[int, ...]:
        """Returns the ids to insert between the sampled ids and the text after `end`; `sampled` is None for a turn that
        ended normally."""
        if sampled is None:
            stopped = end.closes or end.id in self._stops
        else:
            last = sampled[-1] if sampled else None
            stopped = last == end.id or (end.closes and last in self._stops)
        if stopped:
            return ()
        # How many of these the sampled ids end with: a limit may have cut the turn inside them.
        ids, written = tuple(sampled or ()), end.written
        return written[next((n for n in range(len(written), 0, -1) if ids[-n:] == written[:n]), 0) :]

    def as_sampled(self, text: str, start: int, end: TurnEnd) -> str:
        """Cuts `text`, whose last message is the assistant's and begins at `start`, at the token where the policy stops.

        If the template closes no turn, that is `end`, the end of a turn that another message follows.
        """
        at, own = max(((text.rfind(own, start), own) for own in self._stops.values() if own), default=(-1, ""))
        if at >= 0:
            return text[: at + len(own)]
        _, before = self._end_of_answers
        last = _after_anchor(self._renderer.stub_text(Stub.ANSWER.conversation(), generate=False))
        return text.removesuffix(last[len(before) :]) + end.lead + end.text

    def _closing_token(self, stub: Stub) -> tuple[str | None, str]:
        """Returns (the token that closes the stub as the last message, the text between anchor and token)."""
        if stub is Stub.ANSWER:
            return self._end_of_answers
        last = _after_anchor(self._renderer.stub_text(stub.conversation(), generate=False))
        words = len(last.rstrip())
        closing, _ = self._end_of_answers
        if closing is None:
            return None, last[:words]
        if closing in last:
            return closing, last[: last.index(closing)]
        final = [token for token in self._tokens.finditer(last) if token.end() == words]
        if not final:
            raise ConfigError(_OPEN_END)
        return final[-1].group(), last[: final[-1].start()]

    @cached_property
    def _end_of_answers(self) -> tuple[str | None, str]:
        """`_closing_token` for a turn without tool calls: picks the end-of-turn token among those written after the content.

        That is the tokenizer's eos, if it also ends a turn that another message follows (Cohere; Phi's eos ends the whole
        conversation, not a turn); otherwise the first token that does not also occur before the content (Kimi K3 closes
        every part of a turn).
        """
        stub = Stub.ANSWER.conversation()
        text = self._renderer.stub_text(stub, generate=False)
        lead, after = text.partition(ANCHOR)[0], _after_anchor(text)
        if not after.strip():
            return None, ""
        if not self._tokens.match(after.lstrip()):
            raise ConfigError(_OPEN_END)
        head = self._renderer.stub_text([USER_STUB], generate=True)
        inside = self._tokens.findall(lead[common_beginning(head, lead) :])
        ends = [token for token in self._tokens.finditer(after) if token.group() not in inside]
        if not ends:
            raise ConfigError(_OPEN_END)
        followed = _after_anchor(self._renderer.stub_text([*stub, {"role": "user", "content": PROBE}], generate=True))
        eos, kept = self._renderer.tokenizer.eos_token, common_beginning(after, followed)
        end = next((token for token in ends if token.group() == eos and token.end() <= kept), ends[0])
        return end.group(), after[: end.start()]

    def _text_after_stub(self, stub: Stub, role: str) -> tuple[str, str, str]:
        """Returns (white space, token, text before the next content) after a stub that a message of `role` follows."""
        own, before = self._closing_token(stub)
        conversation = stub.conversation([{"role": role, "content": PROBE}])
        text = _after_anchor(self._renderer.stub_text(conversation, generate=True))
        if own is not None and text.startswith(before + own):
            token, start = own, len(before)
        elif text.startswith(before):
            start = len(text) - len(text[len(before) :].lstrip())
            match = self._tokens.match(text, start)
            token = "" if match is None else match.group()
        else:  # the template writes the last turn's content differently
            token, start = own or "", text.find(own or "\0")
        if not token or start < 0:
            raise ConfigError(_OPEN_END)
        return text[len(before) : start], token, text[start + len(token) :].partition(PROBE)[0]

    def _opens_next_message(self, stub: Stub, role: str, token: str, rest: str) -> bool:
        """Whether a token that does not close the last turn is the first token of the next message.

        It is, if the generation prompt begins with it, if messages of another role begin with another token, or if no other
        token is between it and the content and a conversation's first user message begins the same way.
        """
        bare, whole = (self._renderer.stub_text([USER_STUB], generate=flag) for flag in (False, True))
        first = self._tokens.search(whole[len(bare) :]) if whole.startswith(bare) else None
        if first is not None and first.group() == token:
            return True
        for other in {"user", "tool"} - {role}:
            try:
                _, others, others_rest = self._text_after_stub(stub, other)
            except ConfigError:  # the template takes no such message here
                continue
            if others != token or other == "user":
                return others != token or self._opens_user_message(token, others_rest)
        return self._opens_user_message(token, rest) if role == "user" else self._tokens.search(rest) is None

    def _opens_user_message(self, token: str, rest: str) -> bool:
        before, _, _ = self._renderer.stub_text([USER_STUB], generate=False).partition(str(USER_STUB["content"]))
        return self._tokens.search(rest) is None and before.endswith(token + rest)


_OPEN_END = "the chat template does not close an assistant turn with a token of this tokenizer"


def _after_anchor(text: str) -> str:
    _, found, after = text.partition(ANCHOR)
    if not found:
        raise ConfigError("the chat template does not write the content of an assistant message")
    return after
