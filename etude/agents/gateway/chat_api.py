"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from etude.agents.gateway.dialect import Dialect, Events, EventWriter, Json
from etude.agents.gateway.recording import Completion, RenderedRequest, Turn
from etude.agents.gateway.wire import GatewayError
from etude.chat.parsers.streaming import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _answer(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Json:
    request = completion.request
    choices = []
    for index, turn in enumerate(completion.turns):
        message = {"refusal": None, **turn.message, "content": turn.message["content"] or None}
        choices.append({"index": index, "message": message, **_ending(completion, turn, tokenizer)})
    prompt_ids = {"prompt_token_ids": completion.prompt_ids} if request.return_token_ids else {}
    return {
        **_head(completion, "chat.completion", completion.turns),
        "choices": choices,
        "usage": _usage(completion),
        **prompt_ids,
    }


class _ChatWriter(EventWriter):
    def __init__(self, rendered: RenderedRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(rendered, tokenizer)
        options = rendered.request.stream_options
        self._with_usage = options is not None and options.include_usage
        self._head = _head(rendered, "chat.completion.chunk", ())

    def _chunk(self, choices: list[Json], **more: Any) -> tuple[None, Json]:
        return None, {**self._head, "choices": choices, **({"usage": None} if self._with_usage else {}), **more}

    def _delta(self, choice: int, delta: Json) -> tuple[None, Json]:
        return self._chunk([{"index": choice, "delta": delta, "finish_reason": None}])

    def start(self) -> Events:
        for choice in range(self.rendered.request.n or 1):
            yield self._delta(choice, {"role": "assistant", "content": ""})

    def delta(self, choice: int, kind: Kind, text: str) -> Events:
        yield self._delta(choice, {"reasoning_content" if kind == "reasoning" else "content": text})

    def finish(self, completion: Completion) -> Events:
        for choice, turn in enumerate(completion.turns):
            for index, call in enumerate(turn.message.get("tool_calls", ())):
                yield self._delta(choice, {"tool_calls": [{**call, "index": index}]})
        self._head = _head(completion, "chat.completion.chunk", completion.turns)
        for choice, turn in enumerate(completion.turns):
            yield self._chunk([{"index": choice, "delta": {}, **_ending(completion, turn, self.tokenizer)}])
        if self._with_usage:
            yield self._chunk([], usage=_usage(completion))

    def error(self, error: GatewayError) -> Events:
        yield None, error.body()


def _head(rendered: RenderedRequest, kind: str, turns: Sequence[Turn]) -> Json:
    versions = {v for turn in turns for v in turn.read.output.weight_versions}
    return {
        "id": f"chatcmpl-{rendered.name}",
        "object": kind,
        "created": int(time.time()),
        "model": rendered.request.model,
        "system_fingerprint": f"weights-{'-'.join(map(str, sorted(versions)))}" if versions else None,
    }


def _usage(completion: Completion) -> Json:
    prompt, sampled = len(completion.prompt_ids), sum(len(t.read.output.token_ids) for t in completion.turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _ending(completion: Completion, turn: Turn, tokenizer: PreTrainedTokenizerBase) -> Json:
    """A choice's finish reason, log-probs and token ids; these include every sampled token, the end-of-turn token too."""
    request, output = completion.request, turn.read.output
    ending: Json = {"finish_reason": turn.read.finish_reason, "logprobs": None}
    if request.logprobs:
        ending["logprobs"] = {"content": log_probs(turn, tokenizer), "refusal": None}
    if request.return_token_ids:
        ending["token_ids"] = output.token_ids
    return ending


def log_probs(turn: Turn, tokenizer: PreTrainedTokenizerBase) -> list[Json]:
    """The log-probs of a turn's tokens in OpenAI's format."""
    output = turn.read.output
    pairs = [(tokenizer.decode([token]), log_prob) for token, log_prob in zip(output.token_ids, output.log_probs)]
    return [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]


CHAT = Dialect(
    "chat/completions", lambda request, _: request, _answer, _ChatWriter, GatewayError.body, last="data: [DONE]\n\n"
)
