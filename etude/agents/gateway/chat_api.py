"""`/v1/chat/completions` of OpenAI."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from etude.agents.gateway.dialect import Dialect, Json, split_text
from etude.agents.gateway.recording import Turn
from etude.agents.gateway.session import Completion
from etude.agents.gateway.wire import GatewayError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _answer(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Json:
    request = completion.request
    choices = []
    for index, turn in enumerate(completion.turns):
        message = {"refusal": None, **turn.message, "content": turn.message["content"] or None}
        choices.append({"index": index, "message": message, **_ending(completion, turn, tokenizer)})
    prompt_ids = {"prompt_token_ids": completion.prompt_ids} if request.return_token_ids else {}
    return {**_head(completion, "chat.completion"), "choices": choices, "usage": _usage(completion), **prompt_ids}


def _events(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[None, Json]]:
    with_usage = completion.request.stream_options is not None and completion.request.stream_options.include_usage
    head = _head(completion, "chat.completion.chunk")
    last = {"usage": None} if with_usage else {}
    for index, turn in enumerate(completion.turns):
        for delta in _deltas(turn):
            yield None, {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}], **last}
        ending = {"index": index, "delta": {}, **_ending(completion, turn, tokenizer)}
        yield None, {**head, "choices": [ending], **last}
    if with_usage:
        yield None, {**head, "choices": [], "usage": _usage(completion)}


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
        ending["logprobs"] = {"content": log_probs(turn, tokenizer), "refusal": None}
    if request.return_token_ids:
        ending["token_ids"] = output.token_ids
    return ending


def _deltas(turn: Turn) -> Iterator[Json]:
    message = turn.message
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        for piece in split_text(message.get(name, "")):
            yield {name: piece}
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        opening = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        yield {"tool_calls": [opening]}
        for piece in split_text(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def log_probs(turn: Turn, tokenizer: PreTrainedTokenizerBase) -> list[Json]:
    """Those of a turn's tokens, as OpenAI's interfaces have them."""
    output = turn.read.output
    pairs = [(tokenizer.decode([token]), log_prob) for token, log_prob in zip(output.token_ids, output.log_probs)]
    return [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]


CHAT = Dialect(
    "chat/completions", lambda request, _: request, _answer, _events, GatewayError.body, last="data: [DONE]\n\n"
)
