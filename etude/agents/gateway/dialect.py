"""`Dialect`: one HTTP API that agents may use, defined by its translation to and from `/v1/chat/completions`: its request
becomes a chat completion request, and a sampled turn becomes its response.

Invariant: a conversation means the same in every dialect, so one session may mix them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from etude.agents.gateway.recording import Completion, RenderedRequest
from etude.agents.gateway.wire import GatewayError
from etude.chat.parsers.streaming import Kind
from etude.registry import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json: TypeAlias = dict[str, Any]
Replies: TypeAlias = Mapping[str, Sequence[Json]]
"""The conversation up to and including each response of a session, by response id."""
Events: TypeAlias = Iterator[tuple[str | None, Json]]
"""(event name or None, data) pairs."""


class EventWriter:
    """Writes one response as server-sent events: `start`, a `delta` per chunk, then `finish` or `error`.

    Invariant: concatenating the deltas of each kind gives the same response as without streaming.
    """

    def __init__(self, rendered: RenderedRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        self.rendered, self.tokenizer = rendered, tokenizer

    def start(self) -> Events:
        """Events sent before the first chunk."""
        raise NotImplementedError

    def delta(self, choice: int, kind: Kind, text: str) -> Events:
        """Events for the next chunk of a choice's reasoning or content."""
        raise NotImplementedError

    def finish(self, completion: Completion) -> Events:
        """Events sent after the last chunk: tool calls, finish reason, usage."""
        raise NotImplementedError

    def error(self, error: GatewayError) -> Events:
        """Events that end a response which failed midway."""
        raise NotImplementedError


class PartWriter(EventWriter):
    """Writer for APIs whose response is a sequence of parts: reasoning, content, tool calls."""

    def __init__(self, rendered: RenderedRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(rendered, tokenizer)
        self.kind: Kind | None = None  # kind of the open part, if any
        self.text = ""
        """Text of the open part so far."""
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
        """Closes the open part, if any."""
        if self.kind is not None:
            kind, self.kind = self.kind, None
            yield from self.close(kind)
            self.parts += 1

    def end_text(self, completion: Completion) -> Events:
        """Closes the last reasoning or content part; a response with no content and no calls gets an empty content part."""
        message = completion.turns[0].message
        if not message["content"] and "tool_calls" not in message:
            yield from self.delta(0, "content", "")
        yield from self.end()

    def open(self, kind: Kind) -> Events:
        """Events that open a part."""
        raise NotImplementedError

    def piece(self, kind: Kind, text: str) -> Events:
        """Events for a chunk of the open part."""
        raise NotImplementedError

    def close(self, kind: Kind) -> Events:
        """Events that close the open part, whose full text is `self.text`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Dialect:
    """One API, served at `/v1/{path}`.

    Attributes:
        read: (request, replies) → chat completion request. Raises GatewayError, which names the parameter.
        answer: builds the response body.
        writer: writes the same response as a stream.
        error: builds the body of an error response.
        last: line sent after the last event; empty for none.
        names: what it calls the parameters of chat completions, where that differs, for errors.
    """

    path: str
    read: Callable[[Json, Replies], Json]
    answer: Callable[[Completion, PreTrainedTokenizerBase], Json]
    writer: Callable[[RenderedRequest, PreTrainedTokenizerBase], EventWriter]
    error: Callable[[GatewayError], Json]
    last: str = ""
    names: Mapping[str, str] = field(default_factory=dict)


def refuse_unknown(request: Json, known: Iterable[str]) -> None:
    """Raises GatewayError for a parameter that is not in `known`, unless its value is null."""
    names = list(known)
    for name, value in request.items():
        if name not in names and value is not None:
            raise GatewayError(400, f"{name}: unknown parameter{did_you_mean(name, names)}"[:500], param=name[:100])


def each_object(value: object, where: str) -> Iterator[tuple[str, Json]]:
    """Yields (path, object) for each object of a list.

    Raises:
        GatewayError: `value` is not a list of objects.
    """
    for place, each in enumerate(value if isinstance(value, list) else [value]):
        if not isinstance(value, list) or not isinstance(each, dict):
            raise GatewayError(400, f"{where} must be a list of objects", param=where)
        yield f"{where}.{place}", each


def text_of(value: object, where: str) -> str:
    """Returns `value` if it is a string.

    Raises:
        GatewayError: it is not.
    """
    if not isinstance(value, str):
        raise GatewayError(400, f"{where} must be a text", param=where)
    return value


def function_tool(tool: Json, schema: str) -> Json:
    """Converts a tool to the chat completions format; `schema` is the key of its parameters."""
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get(schema)}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def json_schema_format(given: object, where: str) -> Json:
    """Converts a format with its `schema` beside its `type` to chat completions' `response_format`.

    Raises:
        GatewayError: it is no such format.
    """
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise GatewayError(400, f"{where}: must be {{'type': 'json_schema', 'schema': {{…}}}}", param=where)
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}


def text_part(text: str) -> Json:
    """Returns a text part of a message's content."""
    return {"type": "text", "text": text}


def image_part(address: str) -> Json:
    """Returns an image part of a message's content."""
    return {"type": "image_url", "image_url": {"url": address}}
