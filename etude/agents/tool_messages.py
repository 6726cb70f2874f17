"""Tool and user responses as messages that the chat template renders.

Invariant: no text of a model, a tool or a user ends a run. That the template renders their messages at all is checked at
start-up (`etude.chat.check.require_answers`); it may still split some contents, such as a tool's answer with a `</think>`
in it. The text of these is replaced by a line that says so; their images stay. Answers that leave too little room for the
next turn are cut further, as long as something of each is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from etude.agents.images import ShownResponse
from etude.chat import ChatTemplate, ParsedResponse, ToolParser
from etude.chat.placeholders import content_of, image_count, text_of
from etude.errors import ConfigError, DataError
from etude.schemas import FunctionCall
from etude.tools import TokenLimit, ToolOutcome
from etude.trajectory import ToolCallRecord

NOT_EXECUTED = "not_executed"  # the error of a call beyond `max_parallel_calls`
LEAST_TOKENS = 16  # minimum of a cut answer: with fewer, the truncation mark would be most of it
UNWRITABLE = "(this answer cannot be shown: the chat template does not write it as it is)"


@dataclass
class ToolMessages:
    """The answers to one turn's calls, one message each: those that ran (`outcomes`), those beyond
    `max_parallel_calls`, and the errors of malformed ones.

    `texts` are the messages' texts, `with_images` the images that go with them by index, and `names_calls` says whether the
    template writes the name of the tool that a message answers for.
    """

    parsed: ParsedResponse
    outcomes: Sequence[ToolOutcome]
    with_images: Mapping[int, ShownResponse]
    texts: list[str]
    names_calls: bool

    @property
    def image_tokens(self) -> list[int]:
        """Tokens of each image, in order."""
        return [tokens for answer in self.with_images.values() for tokens in answer.tokens]

    def messages(self) -> list[dict[str, Any]]:
        """The answers as messages."""
        calls = self._calls
        unread = [None] * len(self.parsed.errors)
        made = [self.parsed.result_message(text, call) for text, call in zip(self.texts, [*calls, *unread])]
        if self.names_calls:
            made[: len(calls)] = [with_tool_name(message, call.name) for message, call in zip(made, calls)]
        for n, answer in self.with_images.items():
            made[n] = answer.message(made[n])
        return made

    def shorter(self, limit: TokenLimit | None, excess: int) -> list[dict[str, Any]] | None:
        """The messages in `excess` tokens fewer; None if there is not enough to cut."""
        cut = None if limit is None else shorten_texts(self.texts, excess, limit)
        if cut is None:
            return None
        self.texts = cut
        return self.messages()

    def records(self, turn: int) -> list[ToolCallRecord]:
        """The record of each call, with its answer as the model saw it."""
        ran = [outcome.to_record(text) for outcome, text in zip(self.outcomes, self.texts)]
        beyond = zip(self._calls[len(ran) :], self.texts[len(ran) :])
        refused = [ToolCallRecord(turn, call.name, call.arguments, text, error=NOT_EXECUTED) for call, text in beyond]
        return [*ran, *refused, *(malformed_record(turn, text) for text in self.texts[len(ran) + len(refused) :])]

    @property
    def _calls(self) -> list[FunctionCall]:
        return [*[outcome.call for outcome in self.outcomes], *self.parsed.calls[len(self.outcomes) :]]


def with_result_tag(parsed: ParsedResponse, chat: ChatTemplate, parser: ToolParser) -> ParsedResponse:
    """`parsed`, with a tag around its answers where the template has no tool messages."""
    if parsed.result_tag is not None or chat.answers_tools:
        return parsed
    return replace(parsed, result_tag=parser.result_tag or "tool_response")


def malformed_record(turn: int, error: str) -> ToolCallRecord:
    """The record of a malformed call."""
    return ToolCallRecord(turn, "", "", error, error="malformed")


def replace_unwritable(
    chat: ChatTemplate, messages: Sequence[Mapping[str, Any]], image_tokens: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """`messages`, with `UNWRITABLE` for texts that the template does not render; none if that does not help.

    `image_tokens` are those of each image in the messages, which all stay.
    """
    told, images = [], iter(image_tokens)
    for message in messages:
        own = list(islice(images, image_count(message)))
        content = message["content"] if _is_written(chat, [message], own) else content_of(UNWRITABLE, len(own))
        told.append({**message, "content": content})
    return told if _is_written(chat, told, image_tokens) else []


def drop_images(message: dict[str, Any]) -> dict[str, Any]:
    """A message that the model never saw, as text only: a trajectory's messages have exactly the images of its context."""
    return {**message, "content": text_of(message["content"])} if image_count(message) else message


def shorten_texts(texts: Sequence[str], excess: int, limit: TokenLimit) -> list[str] | None:
    """`texts` in `excess` tokens fewer, the longest cut to one length; None if that is less than `LEAST_TOKENS`."""
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


def with_tool_name(message: dict[str, Any], name: str | None) -> dict[str, Any]:
    """A tool message with the name of the function it answers for, if known; any other unchanged."""
    return {**message, "name": name} if name and message.get("role") == "tool" else message


def _is_written(chat: ChatTemplate, messages: Sequence[Mapping[str, Any]], image_tokens: Sequence[int]) -> bool:
    if not all(isinstance(message.get("content"), str) or image_count(message) for message in messages):
        return False
    try:
        return bool(chat.context_ids(messages, image_tokens=image_tokens))
    except (ConfigError, DataError):
        return False
