"""Anthropic's `/v1/messages`: converts its content blocks to messages, and a turn to blocks.

In a user message, tool results come before its other content. A `system` message may stand anywhere. Of Anthropic's beta
parameters, those that say where and for whom a request runs are hints; `thread` is answered as by a server that holds no
threads, whereupon the SDK's tool runner sends the whole history instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from etude.agents.gateway.chat_api import (
    Dialect,
    Events,
    Json,
    Replies,
    each_object,
    function_tool,
    json_schema_format,
    refuse_unknown,
    text_of,
)
from etude.agents.gateway.request import GatewayError
from etude.agents.gateway.rollout_tree import Completion, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "metadata", "service_tier")
_READ = ("system", "messages", "tools", "tool_choice", "stop_sequences", "output_config")
_HINTS = (
    *("thinking", "cache_control", "context_management", "inference_geo", "speed", "diagnostics"),
    *("betas", "billing_policy", "container", "fallbacks", "fallback_credit_token", "user_profile_id", "workspace_id"),
)
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


def _read(request: Json, _: Replies) -> Json:
    if request.get("thread"):
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise GatewayError("thread: send the whole history", param="thread", details=details)
    refuse_unknown({**request, "thread": None}, (*_SAME, *_READ, *_HINTS))
    if request.get("max_tokens") is None:
        raise GatewayError("max_tokens: it must be given", param="max_tokens")
    chat = {name: request[name] for name in _SAME if name in request}
    chat["stop"] = request.get("stop_sequences") or None
    choice = request.get("tool_choice") or {}
    kind = choice.get("type", "auto") if isinstance(choice, dict) else None
    if not isinstance(kind, str) or kind not in (*_CHOICES, "tool"):
        raise GatewayError(f"tool_choice must be an object of type {', '.join(_CHOICES)} or tool", param="tool_choice")
    chat["tool_choice"] = _CHOICES.get(kind) or {"type": "function", "function": {"name": choice.get("name")}}
    config = request.get("output_config") or {}
    output = config.get("format") if isinstance(config, dict) else config
    if output is not None:
        chat["response_format"] = json_schema_format(output, "output_config.format")
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if request.get("tools"):
        chat["tools"] = [_tool(tool, where) for where, tool in each_object(request["tools"], "tools")]
    messages = []
    if request.get("system"):
        texts = [text_of(each.get("text"), f"{place}.text") for place, each in _blocks(request["system"], "system")]
        messages.append({"role": "system", "content": "".join(texts)})
    for where, message in each_object(request.get("messages"), "messages"):
        messages += _messages(message, where)
    if messages and messages[-1]["role"] == "assistant":  # templates close it: the model would answer after it, unasked
        reason = "messages: an answer's beginning (prefill) is not continued here: end with a user message"
        raise GatewayError(reason, param="messages")
    return {**chat, "messages": messages}


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise GatewayError(f"{where}.type: only tools with an input_schema are there to be called", param=where)
    return function_tool(tool, "input_schema")


def _blocks(content: object, where: str) -> list[tuple[str, Json]]:
    return (
        [(where, {"type": "text", "text": content})] if isinstance(content, str) else list(each_object(content, where))
    )


def _messages(message: Json, where: str) -> list[Json]:
    role, blocks = message.get("role"), _blocks(message.get("content"), f"{where}.content")
    if role == "assistant":
        return [_assistant_message(blocks)]
    if role == "system":
        return [{"role": role, "content": "".join(_part(block, place).get("text", "") for place, block in blocks)}]
    if role != "user":
        raise GatewayError(f"{where}.role must be 'user', 'assistant' or 'system'", param=f"{where}.role")
    answers, parts = [], []
    for place, block in blocks:
        if block.get("type") == "tool_result":
            result: Any = [
                _part(part, where) for where, part in _blocks(block.get("content") or "", f"{place}.content")
            ]
            if all("text" in part for part in result):
                result = "".join(part["text"] for part in result)
            answers.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        else:
            parts.append(_part(block, place))
    return answers + ([{"role": "user", "content": parts}] if parts or not answers else [])


def _part(block: Json, where: str) -> Json:
    if block.get("type") == "text":
        return {"type": "text", "text": text_of(block.get("text"), f"{where}.text")}
    source = block.get("source")
    if block.get("type") == "image" and isinstance(source, dict) and source.get("type") == "base64":
        data = text_of(source.get("data"), f"{where}.source.data")
        kind = text_of(source.get("media_type"), f"{where}.source.media_type")
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    raise GatewayError(f"{where}: only texts, images in base64 and answers of tools are read", param=where)


def _assistant_message(blocks: list[tuple[str, Json]]) -> Json:
    message: Json = {"role": "assistant", "content": "", "reasoning_content": ""}
    for where, block in blocks:
        kind = block.get("type")
        if kind == "text":
            message["content"] += text_of(block.get("text"), f"{where}.text")
        elif kind == "thinking":
            message["reasoning_content"] += text_of(block.get("thinking"), f"{where}.thinking")
        elif kind == "tool_use":
            function = {
                "name": block.get("name"),
                "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
            }
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":  # skipped: this policy writes none
            raise GatewayError(f"{where}: a block of type '{str(kind)[:100]}' cannot be read", param=where)
    return message


def _head(completion: Completion) -> Json:
    usage = {"input_tokens": len(completion.prompt_ids), "output_tokens": 0}
    return {
        "id": f"msg_{completion.name}",
        "type": "message",
        "role": "assistant",
        "model": completion.request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
    }


def _content(turn: Turn) -> Iterator[Json]:
    message = turn.message
    if thoughts := message.get("reasoning_content"):
        yield {"type": "thinking", "signature": "", "thinking": thoughts}
    if message["content"] or "tool_calls" not in message:
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}


def _input(arguments: str) -> Any:
    """Parses a call's arguments to the object that the API requires."""
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        read = None
    return read if isinstance(read, dict) else {"arguments": arguments}


def _ending(turn: Turn) -> Json:
    parsed = turn.parsed
    if parsed.finish_reason == "stop" and parsed.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": parsed.stop}
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(parsed.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _answer(completion: Completion, _: PreTrainedTokenizerBase) -> Json:
    [turn], head = completion.turns, _head(completion)
    head["usage"]["output_tokens"] = len(turn.parsed.output.token_ids)
    return head | _ending(turn) | {"content": list(_content(turn))}


_EMPTY: dict[str, Json] = {"text": {"text": ""}, "thinking": {"thinking": ""}, "tool_use": {"input": {}}}
"""How a block of each type begins in a stream."""


def _events(completion: Completion, _: PreTrainedTokenizerBase) -> Events:
    def event(kind: str, **data: Any) -> tuple[str, Json]:
        return kind, {"type": kind, **data}

    [turn] = completion.turns
    yield event("message_start", message=_head(completion))
    for index, block in enumerate(_content(turn)):
        kind = block["type"]
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        else:
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        yield event("content_block_start", index=index, content_block={**block, **_EMPTY[kind]})
        if block.get(kind) != "":
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    usage = {"output_tokens": len(turn.parsed.output.token_ids)}
    yield event("message_delta", delta=_ending(turn), usage=usage)
    yield event("message_stop")


def _error(error: GatewayError) -> Json:
    details = {"details": dict(error.details)} if error.details else {}
    return {"type": "error", "error": {"type": error.body()["error"]["type"], "message": str(error), **details}}


MESSAGES = Dialect(
    "messages",
    _read,
    _answer,
    _events,
    _error,
    lambda error: ("error", _error(error)),
    names={"stop": "stop_sequences", "response_format": "output_config.format"},
)
