"""`Dialect`: one of the interfaces by which agents ask for a turn, in terms of `/v1/chat/completions`: its request becomes
that of a chat completion, and a turn its answer.

Invariant: a conversation means the same in every dialect, so that a session may be asked in several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from etude.agents.gateway.recording import Asked, Completion
from etude.agents.gateway.wire import GatewayError
from etude.chat.parsers.streaming import Kind
from etude.registry import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json: TypeAlias = dict[str, Any]
Replies: TypeAlias = Mapping[str, Sequence[Json]]
"""The conversation up to each answer of a session, by the answer's id."""
Events: TypeAlias = Iterator[tuple[str | None, Json]]
"""(an event's name, or None, and its data)."""


class EventWriter:
    """Writes one answer as a stream: `start`, `delta` for each piece as it becomes certain, and `finish` or `error`.

    Invariant: the pieces, joined by kind, are the answer that is given otherwise.
    """

    def __init__(self, asked: Asked, tokenizer: PreTrainedTokenizerBase) -> None:
        self.asked, self.tokenizer = asked, tokenizer

    def start(self) -> Events:
        """What comes first."""
        raise NotImplementedError

    def delta(self, choice: int, kind: Kind, text: str) -> Events:
        """The next piece of a choice's thoughts or words."""
        raise NotImplementedError

    def finish(self, completion: Completion) -> Events:
        """What follows the last piece: calls, why it ended, usage."""
        raise NotImplementedError

    def error(self, error: GatewayError) -> Events:
        """The end of an answer that fails midway."""
        raise NotImplementedError


class PartWriter(EventWriter):
    """A writer of interfaces in which an answer has parts, one after the other: thoughts, words, calls."""

    def __init__(self, asked: Asked, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(asked, tokenizer)
        self.kind: Kind | None = None  # of the open part
        self.text = ""
        """What the open part has so far."""
        self.parts = 0

    def delta(self, choice: int, kind: Kind, text: str) -> Events:
        """See `EventWriter.delta`."""
        if kind != self.kind:
            yield from self.end()
            self.kind, self.text = kind, ""
            yield from self.open(kind)
        self.text += text
        yield from self.piece(kind, text)

    def end(self) -> Events:
        """Closes the open part, if there is one."""
        if self.kind is not None:
            kind, self.kind = self.kind, None
            yield from self.close(kind)
            self.parts += 1

    def end_words(self, completion: Completion) -> Events:
        """Closes the last part of thoughts or words; an answer without words and calls has an empty one."""
        message = completion.turns[0].message
        if not message["content"] and "tool_calls" not in message:
            yield from self.delta(0, "content", "")
        yield from self.end()

    def open(self, kind: Kind) -> Events:
        """Begins a part."""
        raise NotImplementedError

    def piece(self, kind: Kind, text: str) -> Events:
        """A piece of the open part."""
        raise NotImplementedError

    def close(self, kind: Kind) -> Events:
        """Ends the open part, which has `text`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Dialect:
    """`path` is under `/v1`.

    Attributes:
        read: (request, replies) → the request of a chat completion. Raises GatewayError, which names the parameter.
        answer: the response's body.
        writer: the same as a stream.
        error: the body of a response that is an error.
        last: the line after the last event, if there is one.
    """

    path: str
    read: Callable[[Json, Replies], Json]
    answer: Callable[[Completion, PreTrainedTokenizerBase], Json]
    writer: Callable[[Asked, PreTrainedTokenizerBase], EventWriter]
    error: Callable[[GatewayError], Json]
    last: str = ""


def refuse_unknown(request: Json, known: Iterable[str]) -> None:
    """Raises GatewayError for a parameter that is not among `known`, unless it is null."""
    names = list(known)
    for name, value in request.items():
        if name not in names and value is not None:
            raise GatewayError(400, f"{name}: unknown parameter{did_you_mean(name, names)}"[:500], param=name[:100])


def each_object(value: object, where: str) -> Iterator[tuple[str, Json]]:
    """The objects of a list, each with its place.

    Raises:
        GatewayError: it is no list of objects.
    """
    for place, each in enumerate(value if isinstance(value, list) else [value]):
        if not isinstance(value, list) or not isinstance(each, dict):
            raise GatewayError(400, f"{where} must be a list of objects", param=where)
        yield f"{where}.{place}", each


def text_of(value: object, where: str) -> str:
    """`value`, which must be a text.

    Raises:
        GatewayError: it is none.
    """
    if not isinstance(value, str):
        raise GatewayError(400, f"{where} must be a text", param=where)
    return value


def function_tool(tool: Json, schema: str) -> Json:
    """A tool as chat completions have it; `schema` is the key of its parameters."""
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get(schema)}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def text_part(text: str) -> Json:
    """A text among a message's parts."""
    return {"type": "text", "text": text}


def image_part(address: str) -> Json:
    """An image among a message's parts."""
    return {"type": "image_url", "image_url": {"url": address}}
