"""`/v1/messages` of Anthropic: its blocks as messages, a turn as blocks. Answers of tools come before what else their user's
message says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from etude.agents.gateway.dialect import (
    Dialect,
    Json,
    Replies,
    each_object,
    function_tool,
    image_part,
    refuse_unknown,
    split_text,
    text_of,
    text_part,
)
from etude.agents.gateway.recording import Turn
from etude.agents.gateway.session import Completion
from etude.agents.gateway.wire import GatewayError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "metadata", "service_tier")
_READ = ("system", "messages", "tools", "tool_choice", "stop_sequences")
_HINTS = ("thinking", "cache_control", "context_management", "output_config", "inference_geo", "speed", "diagnostics")
_CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}


def _read(request: Json, _: Replies) -> Json:
    refuse_unknown(request, (*_SAME, *_READ, *_HINTS))
    if request.get("max_tokens") is None:
        raise GatewayError(400, "max_tokens: it must be given", param="max_tokens")
    chat = {name: request[name] for name in _SAME if name in request}
    chat["stop"] = request.get("stop_sequences") or None
    choice = request.get("tool_choice") or {}
    if not isinstance(choice, dict) or str(choice.get("type", "auto")) not in _CHOICES:
        raise GatewayError(400, "tool_choice must be an object of type 'auto' or 'none'", param="tool_choice")
    chat["tool_choice"] = _CHOICES[choice.get("type", "auto")]
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if request.get("tools"):
        chat["tools"] = [_tool(tool, where) for where, tool in each_object(request["tools"], "tools")]
    messages = []
    if request.get("system"):
        messages.append({"role": "system", "content": _texts(request["system"], "system")})
    for where, message in each_object(request.get("messages"), "messages"):
        messages += _messages(message, where)
    return {**chat, "messages": messages}


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise GatewayError(400, f"{where}.type: only tools with an input_schema are there to be called", param=where)
    return function_tool(tool, "input_schema")


def _blocks(content: object, where: str) -> list[tuple[str, Json]]:
    return [(where, text_part(content))] if isinstance(content, str) else list(each_object(content, where))


def _texts(content: object, where: str) -> str:
    return "".join(text_of(block.get("text"), f"{place}.text") for place, block in _blocks(content, where))


def _messages(message: Json, where: str) -> list[Json]:
    role, blocks = message.get("role"), _blocks(message.get("content"), f"{where}.content")
    if role == "assistant":
        return [_assistants(blocks)]
    if role != "user":
        raise GatewayError(400, f"{where}.role must be 'user' or 'assistant'", param=f"{where}.role")
    answers, parts = [], []
    for place, block in blocks:
        if block.get("type") == "tool_result":
            said = _texts(block.get("content") or "", f"{place}.content")
            answers.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said})
        else:
            parts.append(_part(block, place))
    return answers + ([{"role": "user", "content": parts}] if parts or not answers else [])


def _part(block: Json, where: str) -> Json:
    if block.get("type") == "text":
        return text_part(text_of(block.get("text"), f"{where}.text"))
    source = block.get("source")
    if block.get("type") == "image" and isinstance(source, dict) and source.get("type") == "base64":
        data = text_of(source.get("data"), f"{where}.source.data")
        return image_part(f"data:{text_of(source.get('media_type'), f'{where}.source.media_type')};base64,{data}")
    raise GatewayError(400, f"{where}: only texts, images in base64 and answers of tools are read", param=where)


def _assistants(blocks: list[tuple[str, Json]]) -> Json:
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
        elif kind != "redacted_thinking":  # none of ours
            raise GatewayError(400, f"{where}: a block of type '{str(kind)[:100]}' cannot be read", param=where)
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


def _content(turn: Turn) -> Iterator[tuple[Json, Json, str, str]]:
    """Of each block: (it without its contents, its contents, the delta's type, the contents as a text)."""
    message = turn.message
    if thoughts := message.get("reasoning_content"):
        yield {"type": "thinking", "signature": ""}, {"thinking": thoughts}, "thinking", thoughts
    if message["content"] or "tool_calls" not in message:
        yield {"type": "text"}, {"text": message["content"]}, "text", message["content"]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        opening = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        yield opening, {"input": _input(function["arguments"])}, "input_json", function["arguments"]


def _input(arguments: str) -> Any:
    """The arguments as the object that the interface has."""
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        read = None
    return read if isinstance(read, dict) else {"arguments": arguments}


def _ending(turn: Turn, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Json:
    read = turn.read
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(read.finish_reason, "end_turn")
    stop = None
    if read.finish_reason == "stop" and completion.request.stops:
        text = tokenizer.decode(read.output.token_ids)
        found = [(at, each) for each in completion.request.stops if (at := text.find(each)) >= 0]
        if found:
            reason, stop = "stop_sequence", min(found)[1]
    return {"stop_reason": reason, "stop_sequence": stop}


def _answer(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Json:
    [turn], head = completion.turns, _head(completion)
    head["usage"]["output_tokens"] = len(turn.read.output.token_ids)
    content = [opening | contents for opening, contents, _, _ in _content(turn)]
    return head | _ending(turn, completion, tokenizer) | {"content": content}


def _events(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, Json]]:
    [turn] = completion.turns
    events: list[Json] = [{"type": "message_start", "message": _head(completion)}]
    for index, (opening, contents, kind, text) in enumerate(_content(turn)):
        where = {"index": index}
        empty = {key: {} if key == "input" else "" for key in contents}
        events.append({"type": "content_block_start", **where, "content_block": opening | empty})
        key = "partial_json" if kind == "input_json" else kind
        for piece in split_text(text):
            events.append({"type": "content_block_delta", **where, "delta": {"type": f"{kind}_delta", key: piece}})
        events.append({"type": "content_block_stop", **where})
    usage = {"output_tokens": len(turn.read.output.token_ids)}
    events.append({"type": "message_delta", "delta": _ending(turn, completion, tokenizer), "usage": usage})
    events.append({"type": "message_stop"})
    for event in events:
        yield event["type"], event


def _error(error: GatewayError) -> Json:
    return {"type": "error", "error": {"type": error.body()["error"]["type"], "message": str(error)}}


MESSAGES = Dialect("messages", _read, _answer, _events, _error)
