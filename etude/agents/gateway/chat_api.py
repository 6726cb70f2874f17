"""OpenAI's `/v1/chat/completions`, and `Dialect`: an API that agents may use, defined by its translation to and from this
one. Its request becomes a chat completion request, and a sampled turn becomes its response.

Invariant: a conversation means the same in every dialect, so one session may mix them. A streamed response has the same
content as one that is not: its events are written from the finished turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from etude.agents.gateway.request import GatewayError
from etude.agents.gateway.rollout_tree import Completion, Turn
from etude.registry import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json: TypeAlias = dict[str, Any]
Replies: TypeAlias = Mapping[str, Sequence[Json]]
"""The conversation up to and including each response of a session, by response id."""
Events: TypeAlias = Iterator[tuple[str | None, Json]]
"""Server-sent events, as (event name or None, data) pairs."""


@dataclass(frozen=True)
class Dialect:
    """One API, served at `/v1/{path}`.

    Attributes:
        read: (request, replies) → chat completion request. Raises GatewayError, which names the parameter.
        answer: builds the response body.
        events: writes the same response as a stream.
        error: builds the body of an error response.
        error_event: the event that ends a stream which failed midway.
        last: line sent after the last event; empty for none.
        names: what it calls the parameters of chat completions, where that differs, for errors.
    """

    path: str
    read: Callable[[Json, Replies], Json]
    answer: Callable[[Completion, PreTrainedTokenizerBase], Json]
    events: Callable[[Completion, PreTrainedTokenizerBase], Events]
    error: Callable[[GatewayError], Json]
    error_event: Callable[[GatewayError], tuple[str | None, Json]]
    last: str = ""
    names: Mapping[str, str] = field(default_factory=dict)


def refuse_unknown(request: Json, known: Iterable[str]) -> None:
    """Raises GatewayError for a parameter that is not in `known`, unless its value is null."""
    names = list(known)
    for name, value in request.items():
        if name not in names and value is not None:
            raise GatewayError(f"{name}: unknown parameter{did_you_mean(name, names)}"[:500], param=name[:100])


def each_object(value: object, where: str) -> Iterator[tuple[str, Json]]:
    """Yields (path, object) for each object of a list.

    Raises:
        GatewayError: `value` is not a list of objects.
    """
    for place, each in enumerate(value if isinstance(value, list) else [value]):
        if not isinstance(value, list) or not isinstance(each, dict):
            raise GatewayError(f"{where} must be a list of objects", param=where)
        yield f"{where}.{place}", each


def text_of(value: object, where: str) -> str:
    """Returns `value` if it is a string.

    Raises:
        GatewayError: it is not.
    """
    if not isinstance(value, str):
        raise GatewayError(f"{where} must be a text", param=where)
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
        raise GatewayError(f"{where}: must be {{'type': 'json_schema', 'schema': {{…}}}}", param=where)
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}


def log_probs(turn: Turn, tokenizer: PreTrainedTokenizerBase) -> list[Json]:
    """The log-probs of a turn's tokens in OpenAI's format."""
    output = turn.parsed.output
    pairs = [(tokenizer.decode([token]), log_prob) for token, log_prob in zip(output.token_ids, output.log_probs)]
    return [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]


def _answer(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Json:
    choices = []
    for index, turn in enumerate(completion.turns):
        message = {"refusal": None, **turn.message, "content": turn.message["content"] or None}
        choices.append({"index": index, "message": message, **_ending(completion, turn, tokenizer)})
    prompt_ids = {"prompt_token_ids": completion.prompt_ids} if completion.request.return_token_ids else {}
    return {**_head(completion, "chat.completion"), "choices": choices, "usage": _usage(completion), **prompt_ids}


def _events(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Events:
    """One chunk with each choice's message, one with its end, and one with the usage if the client asked for it."""
    options = completion.request.stream_options
    with_usage = options is not None and options.include_usage
    head = {**_head(completion, "chat.completion.chunk"), **({"usage": None} if with_usage else {})}
    for index, turn in enumerate(completion.turns):
        delta = dict(turn.message)
        if "tool_calls" in delta:
            delta["tool_calls"] = [{**call, "index": number} for number, call in enumerate(delta["tool_calls"])]
        yield None, {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}
        yield None, {**head, "choices": [{"index": index, "delta": {}, **_ending(completion, turn, tokenizer)}]}
    if with_usage:
        yield None, {**head, "choices": [], "usage": _usage(completion)}


def _head(completion: Completion, kind: str) -> Json:
    versions = {version for turn in completion.turns for version in turn.parsed.output.weight_versions}
    return {
        "id": f"chatcmpl-{completion.name}",
        "object": kind,
        "created": int(time.time()),
        "model": completion.request.model,
        "system_fingerprint": f"weights-{'-'.join(map(str, sorted(versions)))}" if versions else None,
    }


def _usage(completion: Completion) -> Json:
    prompt, sampled = len(completion.prompt_ids), sum(len(turn.parsed.output.token_ids) for turn in completion.turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _ending(completion: Completion, turn: Turn, tokenizer: PreTrainedTokenizerBase) -> Json:
    """A choice's finish reason, log-probs and token ids; these include every sampled token, the end-of-turn token too."""
    ending: Json = {"finish_reason": turn.parsed.finish_reason, "logprobs": None}
    if completion.request.logprobs:
        ending["logprobs"] = {"content": log_probs(turn, tokenizer), "refusal": None}
    if completion.request.return_token_ids:
        ending["token_ids"] = turn.parsed.output.token_ids
    return ending


CHAT = Dialect(
    "chat/completions",
    lambda request, _: request,
    _answer,
    _events,
    GatewayError.body,
    lambda error: (None, error.body()),
    last="data: [DONE]\n\n",
)
