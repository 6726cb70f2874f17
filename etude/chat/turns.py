"""How an assistant turn ends, and the stub turns after which a rollout's new messages are rendered.

It is found by comparing a stub turn rendered as the last message with one that another message follows:

    the turn as the last one        the turn in a history       the policy stops at     what follows is taken from after
    closed by a token               closed by the same          that token              that token
    closed by a token               closed by another           the last one's token    the history's token
    closed by a token               the next message's first    the last one's token    nothing: all of it is written
    not closed                      the next message's first    that first token        that first token

(ChatML; gpt-oss, where `<|return|>` becomes `<|end|>`; templates that close the last turn alone; GLM.) A turn that calls
may end with another token than one that answers (gpt-oss: `<|call|>`): either closes a turn of any kind.

Invariant: sampled ids are never changed. A token that ends a turn is put before what follows only if the sampled ids do not
end with it, nor with one that the template would have replaced by it. After any other stop (a limit, the eos of a model that
has another end of turn, the first token of a message that does not follow) it is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from etude.chat.contents import Message
from etude.chat.encoding import Encoder, common_beginning
from etude.chat.provenance import ProvenanceEncoder
from etude.chat.rendering import Renderer
from etude.errors import ConfigError

ANCHOR = "Etude stub turn"
PROBE = "An answer with 42 words."
USER_STUB: Message = {"role": "user", "content": "A question."}
_UNNAMED = "unknown"  # the function of an answer that does not say whose it is, in templates that write names
_NAMES = ("name", "tool_call_id")
_PLAIN = re.compile(r"[\w.:/-]{1,128}")


class Stub(Enum):
    """A stub turn, by what it holds."""

    ANSWER = "an answer"
    CALL = "one call"
    CALLS = "a call for each tool message"

    __hash__ = object.__hash__  # `Enum`'s own is written in Python, and every turn does a dict lookup

    def before(self, answers: Sequence[Message]) -> tuple[Message, Message]:
        """The stub conversation that `answers`, as `answers_to` gives them, follow."""
        if self is Stub.ANSWER:
            return USER_STUB, {"role": "assistant", "content": ANCHOR}
        asked = [m for m in answers if m.get("role") == "tool"] or [{}]
        calls = [
            {
                "id": message.get("tool_call_id", _call_id(0)),
                "type": "function",
                "function": {"name": message.get("name", _UNNAMED), "arguments": {"text": ANCHOR}},
            }
            for message in (asked if self is Stub.CALLS else asked[:1])
        ]
        return USER_STUB, {"role": "assistant", "content": "", "tool_calls": calls}

    def answers_to(self, messages: Sequence[Message]) -> list[Message]:
        """`messages`, tool messages naming the call that they answer where the stub makes one.

        A function's name or a call's id comes from the model, and becomes part of the template's text: one with other than
        plain characters is not written.
        """
        if self is Stub.ANSWER:
            return list(messages)
        answers: list[Message] = []
        asked = 0
        for message in messages:
            if message.get("role") == "tool":
                message = {key: value for key, value in message.items() if key not in _NAMES or _is_plain(value)}
                message = {"tool_call_id": _call_id(asked if self is Stub.CALLS else 0), **message}
                asked += 1
            answers.append(message)
        return answers


def _is_plain(value: object) -> bool:
    return isinstance(value, str) and _PLAIN.fullmatch(value) is not None


def _call_id(number: int) -> str:
    """Nine letters and digits, as Mistral's templates require."""
    return f"stub{number:05d}"


@dataclass(frozen=True)
class TurnEnd:
    """The token after which what follows a turn is taken.

    `lead` is white space before it. `closes`: it is the turn's own, and not the first token of the next message. `written`
    is put where the policy did not end its turn so; `encoder` encodes after the token.
    """

    text: str
    lead: str
    id: int
    closes: bool
    written: tuple[int, ...]
    encoder: ProvenanceEncoder


class Turns:
    """The ends of one template's turns; `control` are the ids that no content may become.

    Raises:
        ConfigError: the template does not write an assistant's words, or does not end them with a token.
    """

    def __init__(self, renderer: Renderer, encoder: Encoder, control: frozenset[int]) -> None:
        self._renderer, self._encoder, self._control = renderer, encoder, control
        added = renderer.tokenizer.added_tokens_decoder
        self._added = {token.content: number for number, token in added.items() if token.content.strip()}
        self._tokens = re.compile("|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) or r"(?!)")
        self._ends: dict[tuple[Stub, str], TurnEnd] = {}
        self._stops: dict[int, str | None] = {}
        self.answered = self.use(Stub.ANSWER, "user")

    @property
    def stops(self) -> tuple[int, ...]:
        """The tokens that the policy ends its turns with, that of an answer first."""
        return tuple(self._stops)

    def use(self, stub: Stub, role: str) -> TurnEnd:
        """`end`; from now on the policy stops as such a turn ends."""
        end, (own, _) = self.end(stub, role), self._last(stub)
        self._stops[end.id if own is None else self._added[own]] = own
        return end

    def end(self, stub: Stub, role: str) -> TurnEnd:
        """The end of a stub turn that a message of `role` follows.

        Raises:
            ConfigError: the template refuses that, or does not end the turn with a token.
        """
        found = self._ends.get((stub, role))
        if found is None:
            found = self._ends[stub, role] = self._found(stub, role)
        return found

    def has_token(self, text: str, *, beyond: int) -> bool:
        """Whether an added token that is spelled out in `text` ends beyond that place."""
        return any(token.end() > beyond for token in self._tokens.finditer(text))

    def opening(self, end: TurnEnd, sampled: Sequence[int] | None) -> tuple[int, ...]:
        """What stands in front of that which follows `end`, after these sampled ids (None: a turn that ended by itself)."""
        if sampled is None:
            stopped = end.closes or end.id in self._stops
        else:
            last = sampled[-1] if sampled else None
            stopped = last == end.id or (end.closes and last in self._stops)
        return () if stopped else end.written[_begun(sampled or (), end.written) :]

    def as_sampled(self, text: str, start: int, end: TurnEnd) -> str:
        """`text`, in which an assistant's message stands last and begins at `start`, up to the policy's stop.

        `end` is that of a turn which the next message follows: where the template closes none, its token is the stop.
        """
        at, own = max(((text.rfind(own, start), own) for own in self._stops.values() if own), default=(-1, ""))
        if at >= 0:
            return text[: at + len(own)]
        _, before = self._end_of_answers
        last = _after_anchor(self._renderer.stub_text(Stub.ANSWER.before([]), generate=False))
        return text.removesuffix(last[len(before) :]) + end.lead + end.text

    def _found(self, stub: Stub, role: str) -> TurnEnd:
        own, before = self._last(stub)
        lead, written, rest = self._followed(stub, role)
        closes = written == own or not self._opens(stub, role, written, rest)
        ids = self._encoder.ids(f"{written}{lead}{written}")[1:] if lead and not closes else [self._added[written]]
        if stub is Stub.ANSWER and written == own:  # with the tokens that stand before it
            ids = self._encoder.ids(before.lstrip() + written)
        encoder = ProvenanceEncoder(self._encoder, written, self._control)
        return TurnEnd(written, lead, self._added[written], closes, tuple(ids), encoder)

    def _last(self, stub: Stub) -> tuple[str | None, str]:
        """(the token that closes the stub where it is the last message, what stands before it after the anchor)."""
        if stub is Stub.ANSWER:
            return self._end_of_answers
        last = _after_anchor(self._renderer.stub_text(stub.before([]), generate=False))
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
        """`_last` of an answer: the token, of those that the template writes after its words, that ends it.

        It is the tokenizer's end of sequence, where that also ends an answer which a message follows (Cohere; Phi puts one
        after the whole conversation, which ends no turn), or else the first one that does not stand in front of the words,
        too (Kimi K3 closes every part of a turn).
        """
        stub = Stub.ANSWER.before([])
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

    def _followed(self, stub: Stub, role: str) -> tuple[str, str, str]:
        """(white space, token, what leads to the content) after the words of a stub that a message of `role` follows."""
        own, before = self._last(stub)
        messages = stub.answers_to([{"role": role, "content": PROBE}])
        text = _after_anchor(self._renderer.stub_text([*stub.before(messages), *messages], generate=True))
        if own is not None and text.startswith(before + own):
            token, start = own, len(before)
        elif text.startswith(before):
            start = len(text) - len(text[len(before) :].lstrip())
            match = self._tokens.match(text, start)
            token = "" if match is None else match.group()
        else:  # it writes the words of the last turn otherwise
            token, start = own or "", text.find(own or "\0")
        if not token or start < 0:
            raise ConfigError(_OPEN_END)
        return text[len(before) : start], token, text[start + len(token) :].partition(PROBE)[0]

    def _opens(self, stub: Stub, role: str, token: str, rest: str) -> bool:
        """Whether a token that does not close the last turn is the first one of the message that follows.

        It is, where the generation prompt begins with it, where messages of another role begin with another, or where no
        other token stands between it and the content, and it stands so before a conversation's first message, too.
        """
        first = self._tokens.search(self._generation_prompt)
        if first is not None and first.group() == token:
            return True
        for other in {"user", "tool"} - {role}:
            try:
                _, others, others_rest = self._followed(stub, other)
            except ConfigError:  # it knows no such messages here
                continue
            if others != token or other == "user":
                return others != token or self._opens_users(token, others_rest)
        return self._opens_users(token, rest) if role == "user" else self._tokens.search(rest) is None

    def _opens_users(self, token: str, rest: str) -> bool:
        before, _, _ = self._renderer.stub_text([USER_STUB], generate=False).partition(str(USER_STUB["content"]))
        return self._tokens.search(rest) is None and before.endswith(token + rest)

    @cached_property
    def _generation_prompt(self) -> str:
        bare, whole = (self._renderer.stub_text([USER_STUB], generate=flag) for flag in (False, True))
        return whole[len(bare) :] if whole.startswith(bare) else ""


_OPEN_END = "the chat template does not close an assistant turn with a token of this tokenizer"


def _begun(sampled: Sequence[int], closing: tuple[int, ...]) -> int:
    """How many ids of `closing` the sampled ones end with: a limit may have cut them there."""
    return next((n for n in range(len(closing), 0, -1) if tuple(sampled[-n:]) == closing[:n]), 0)


def _after_anchor(text: str) -> str:
    _, found, after = text.partition(ANCHOR)
    if not found:
        raise ConfigError("the chat template does not write the content of an assistant message")
    return after
