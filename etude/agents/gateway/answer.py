"""A `Completion` in OpenAI's format: an object, or the events of a stream.

A stream is sent once the turn is complete, since engines return whole turns: it exists for clients that read streams.

Invariant: joining a stream's deltas gives the message of the object.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from etude.agents.gateway.recording import Turn
from etude.agents.gateway.session import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]
_PIECES = re.compile(r"\s*\S+\s*|\s+")


def as_object(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Json:
    """The body of a response that is not streamed."""
    request = completion.request
    choices = []
    for index, turn in enumerate(completion.turns):
        message = {"refusal": None, **turn.message, "content": turn.message["content"] or None}
        choices.append({"index": index, "message": message, **_ending(completion, turn, tokenizer)})
    prompt_ids = {"prompt_token_ids": completion.prompt_ids} if request.return_token_ids else {}
    return {**_head(completion, "chat.completion"), "choices": choices, "usage": _usage(completion), **prompt_ids}


def as_events(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> bytes:
    """The body of a streamed response: server-sent events."""
    with_usage = completion.request.stream_options is not None and completion.request.stream_options.include_usage
    head = _head(completion, "chat.completion.chunk")
    last = {"usage": None} if with_usage else {}
    events: list[Json] = []
    for index, turn in enumerate(completion.turns):
        for delta in _deltas(turn):
            events.append({**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}], **last})
        ending = {"index": index, "delta": {}, **_ending(completion, turn, tokenizer)}
        events.append({**head, "choices": [ending], **last})
    if with_usage:
        events.append({**head, "choices": [], "usage": _usage(completion)})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def _head(completion: Completion, kind: str) -> Json:
    versions = {v for turn in completion.turns for v in turn.read.output.weight_versions}
    return {
        "id": f"chatcmpl-{completion.name}",
        "object": kind,
        "created": int(time.time()),
        "model": completion.request.model,
        "system_fingerprint": f"weights-{'-'.join(map(str, sorted(versions)))}",
    }


def _usage(completion: Completion) -> Json:
    prompt, sampled = len(completion.prompt_ids), sum(len(t.read.output.token_ids) for t in completion.turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _ending(completion: Completion, turn: Turn, tokenizer: PreTrainedTokenizerBase) -> Json:
    """A choice's finish reason, log-probs and ids; every sampled token counts, including the end of the turn."""
    request, output = completion.request, turn.read.output
    ending: Json = {"finish_reason": turn.read.finish_reason, "logprobs": None}
    if request.logprobs:
        content = []
        for token, log_prob in zip(output.token_ids, output.log_probs):
            text = tokenizer.decode([token])
            content.append({"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []})
        ending["logprobs"] = {"content": content, "refusal": None}
    if request.return_token_ids:
        ending["token_ids"] = output.token_ids
    return ending


def _deltas(turn: Turn) -> Iterator[Json]:
    message = turn.message
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        for piece in _PIECES.findall(message.get(name, "")):
            yield {name: piece}
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        opening = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        yield {"tool_calls": [opening]}
        for piece in _PIECES.findall(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
