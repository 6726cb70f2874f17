"""Builds the tool messages that answer a turn's calls, for the chat template to render.

Invariant: no text written by a model, a tool or a user makes the run fail. That the template renders tool messages at all is
checked at start-up (`etude.chat.check.require_answers`); it may still split some contents, such as a tool result with words
at which the template cuts. Such text is replaced by a placeholder line; images stay. Tool results that leave too little room
for the next turn are truncated further, but each keeps at least `LEAST_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from etude.agents.images import RenderedResponse
from etude.chat import ChatTemplate, ParsedResponse, ToolParser
from etude.chat.placeholders import content_of, image_count, text_of
from etude.errors import ConfigError, DataError
from etude.schemas import FunctionCall
from etude.tools import TokenLimit, ToolOutcome
from etude.trajectory import ToolCallRecord

NOT_EXECUTED = "not_executed"  # the error of a call beyond `max_parallel_calls`
LEAST_TOKENS = 16  # minimum length of a truncated result: below this, it would be mostly the truncation mark
UNWRITABLE = "(this answer cannot be shown: the chat template does not write it as it is)"


@dataclass
class ToolMessages:
    """The tool messages for one turn's calls, one each: calls that ran, calls beyond `max_parallel_calls`, and malformed
    calls, in this order.

    Attributes:
        parsed: the parsed turn.
        outcomes: outcomes of the calls that ran.
        with_images: responses with images, by message index.
        texts: the messages' texts.
        needs_tool_names: whether the template writes the tool's name into its message.
    """

    parsed: ParsedResponse
    outcomes: Sequence[ToolOutcome]
    with_images: Mapping[int, RenderedResponse]
    texts: list[str]
    needs_tool_names: bool

    @property
    def image_tokens(self) -> list[int]:
        """Number of tokens of each image, in order."""
        return [tokens for answer in self.with_images.values() for tokens in answer.tokens]

    def messages(self) -> list[dict[str, Any]]:
        """Returns one message per call."""
        calls = self._calls
        unread = [None] * len(self.parsed.errors)
        made = [self.parsed.result_message(text, call) for text, call in zip(self.texts, [*calls, *unread])]
        if self.needs_tool_names:
            made[: len(calls)] = [with_tool_name(message, call.name) for message, call in zip(made, calls)]
        for n, answer in self.with_images.items():
            made[n] = answer.message(made[n])
        return made

    def shorter(self, limit: TokenLimit | None, excess: int) -> list[dict[str, Any]] | None:
        """Truncates the texts by `excess` tokens in total and returns the messages; None if that is not possible."""
        cut = None if limit is None else shorten_texts(self.texts, excess, limit)
        if cut is None:
            return None
        self.texts = cut
        return self.messages()

    def records(self, turn: int) -> list[ToolCallRecord]:
        """Returns the record of each call, with the result as the model saw it."""
        ran = [outcome.to_record(text) for outcome, text in zip(self.outcomes, self.texts)]
        beyond = zip(self._calls[len(ran) :], self.texts[len(ran) :])
        refused = [ToolCallRecord(turn, call.name, call.arguments, text, error=NOT_EXECUTED) for call, text in beyond]
        return [*ran, *refused, *(malformed_record(turn, text) for text in self.texts[len(ran) + len(refused) :])]

    @property
    def _calls(self) -> list[FunctionCall]:
        return [*[outcome.call for outcome in self.outcomes], *self.parsed.calls[len(self.outcomes) :]]


def with_result_tag(parsed: ParsedResponse, chat: ChatTemplate, parser: ToolParser) -> ParsedResponse:
    """Sets the tag around tool results if the template has no tool role."""
    if parsed.result_tag is not None or chat.answers_tools:
        return parsed
    return replace(parsed, result_tag=parser.result_tag or "tool_response")


def malformed_record(turn: int, error: str) -> ToolCallRecord:
    """Returns the record of a malformed call."""
    return ToolCallRecord(turn, "", "", error, error="malformed")


def replace_unwritable(
    chat: ChatTemplate, messages: Sequence[Mapping[str, Any]], image_tokens: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Replaces texts that the template cannot render by `UNWRITABLE`; returns an empty list if that does not help.

    `image_tokens`: number of tokens of each image in the messages; all images stay.
    """
    replaced, images = [], iter(image_tokens)
    for message in messages:
        own = list(islice(images, image_count(message)))
        content = message["content"] if _can_render(chat, [message], own) else content_of(UNWRITABLE, len(own))
        replaced.append({**message, "content": content})
    return replaced if _can_render(chat, replaced, image_tokens) else []


def drop_images(message: dict[str, Any]) -> dict[str, Any]:
    """Removes the images of a message that the model never saw: a trajectory's messages must have exactly its context's."""
    return {**message, "content": text_of(message["content"])} if image_count(message) else message


def shorten_texts(texts: Sequence[str], excess: int, limit: TokenLimit) -> list[str] | None:
    """Truncates the longest of `texts` to a common length that saves `excess` tokens; None if that length would be below
    `LEAST_TOKENS`."""
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
    """Adds the function's name, if known, to a tool message; returns other messages unchanged."""
    return {**message, "name": name} if name and message.get("role") == "tool" else message


def _can_render(chat: ChatTemplate, messages: Sequence[Mapping[str, Any]], image_tokens: Sequence[int]) -> bool:
    if not all(isinstance(message.get("content"), str) or image_count(message) for message in messages):
        return False
    try:
        return bool(chat.context_ids(messages, image_tokens=image_tokens))
    except (ConfigError, DataError):
        return False
