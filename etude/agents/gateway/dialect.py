"""`Dialect`: one of the interfaces by which agents ask for a turn, in terms of `/v1/chat/completions`: its request becomes
that of a chat completion, and a turn its answer.

Invariant: a conversation means the same in every dialect, so that a session may be asked in several.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from etude.agents.gateway.wire import GatewayError
from etude.registry import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from etude.agents.gateway.session import Completion

Json: TypeAlias = dict[str, Any]
Replies: TypeAlias = Mapping[str, Sequence[Json]]
"""The conversation up to each answer of a session, by the answer's id."""
_PIECES = re.compile(r"\s*\S+\s*|\s+")


@dataclass(frozen=True)
class Dialect:
    """`path` is under `/v1`.

    Attributes:
        read: (request, replies) → the request of a chat completion. Raises GatewayError, which names the parameter.
        answer: the response's body.
        events: the same as a stream: (event's name, or None, and its data).
        error: the body of a response that is an error.
        last: the line after the last event, if there is one.
    """

    path: str
    read: Callable[[Json, Replies], Json]
    answer: Callable[[Completion, PreTrainedTokenizerBase], Json]
    events: Callable[[Completion, PreTrainedTokenizerBase], Iterable[tuple[str | None, Json]]]
    error: Callable[[GatewayError], Json]
    last: str = ""


def split_text(text: str) -> list[str]:
    """The pieces in which a stream has a text."""
    return _PIECES.findall(text)


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
