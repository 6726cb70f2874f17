"""OpenAI's `/v1/responses`: converts its items to messages, and a turn to items.

A reasoning item, an assistant message and the calls after it are one turn. `previous_response_id` continues a response of
the same session, unless that was requested with `store=false`.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from etude.agents.gateway.chat_api import (
    Dialect,
    Events,
    Json,
    Replies,
    each_object,
    function_tool,
    json_schema_format,
    log_probs,
    refuse_unknown,
    text_of,
)
from etude.agents.gateway.request import GatewayError
from etude.agents.gateway.rollout_tree import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "top_logprobs",
    "tool_choice",
    "parallel_tool_calls",
    "stream",
    "store",
)
_HINTS = ("user", "metadata", "service_tier", "reasoning", "prompt_cache_key", "prompt_cache_retention")
_MORE_HINTS = ("safety_identifier", "stream_options", "max_tool_calls", "client_metadata")
_READ = ("input", "instructions", "previous_response_id", "tools", "text", "include", "max_output_tokens")
_FIXED = {"truncation": "disabled", "background": False}  # the only supported values
_UNSUPPORTED = {
    "conversation": "send previous_response_id, or the whole input",
    "prompt": "send instructions and input",
}
_LOG_PROBS = "message.output_text.logprobs"
INSTRUCTIONS = "of_instructions"
"""Marks the message made from `instructions`, which do not carry over to the next response."""


def _read(request: Json, replies: Replies) -> Json:
    refuse_unknown(request, (*_SAME, *_HINTS, *_MORE_HINTS, *_READ, *_FIXED, *_UNSUPPORTED))
    for name, advice in _UNSUPPORTED.items():
        if request.get(name) is not None:
            raise GatewayError(f"{name}: not supported: {advice}", param=name)
    for name, value in _FIXED.items():
        if request.get(name) not in (None, value):
            raise GatewayError(f"{name}: only {value!r} can be kept to", param=name)
    include = request.get("include") or []
    if not isinstance(include, list) or set(map(str, include)) - {_LOG_PROBS, "reasoning.encrypted_content"}:
        raise GatewayError(f"include: only '{_LOG_PROBS}' can be kept to", param="include")
    chat = {name: request[name] for name in _SAME if name in request}
    text = request.get("text") or {}
    output = text.get("format") if isinstance(text, dict) else text
    if isinstance(output, dict) and output.get("type") == "json_schema":
        output = json_schema_format(output, "text.format")
    chat["response_format"] = output
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    chat["max_tokens"], chat["logprobs"] = request.get("max_output_tokens"), _LOG_PROBS in include
    if request.get("tools"):
        chat["tools"] = [_tool(tool, where) for where, tool in each_object(request["tools"], "tools")]
    messages: list[Json] = []
    if request.get("instructions"):
        instructions = text_of(request["instructions"], "instructions")
        messages.append({"role": "system", "content": instructions, INSTRUCTIONS: True})
    if (previous := request.get("previous_response_id")) is not None:
        if text_of(previous, "previous_response_id") not in replies:
            reason = f"previous_response_id: this session has (or keeps) no response '{str(previous)[:100]}'"
            raise GatewayError(reason, param="previous_response_id", status=404)
        messages += replies[previous]
    return {**chat, "messages": messages + _messages(request.get("input"))}


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") != "function":
        raise GatewayError(f"{where}.type: only 'function' is there to be called", param=where)
    if not tool.get("name"):
        reason = f"{where}.name: a function is {{'type': 'function', 'name': …, 'parameters': …}} here"
        raise GatewayError(reason, param=where)
    return function_tool(tool, "parameters")


def _messages(given: object) -> list[Json]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    turn: Json | None = None  # the open assistant message, to which further items may belong
    for where, item in each_object(given, "input"):
        kind = item.get("type", "message")
        if kind == "reasoning":
            parts = each_object(item.get("content") or item.get("summary") or [], f"{where}.content")
            thoughts = "".join(text_of(part.get("text"), f"{place}.text") for place, part in parts)
            turn = {"role": "assistant", "content": "", "reasoning_content": thoughts}
            messages.append(turn)
        elif kind == "function_call":
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            turn.setdefault("tool_calls", []).append(
                {"id": item.get("call_id"), "type": "function", "function": function}
            )
        elif kind == "function_call_output":
            answer = {"tool_call_id": item.get("call_id"), "content": _content(item.get("output"), f"{where}.output")}
            messages.append({"role": "tool", **answer})
            turn = None
        elif kind == "message":
            content = _content(item.get("content"), f"{where}.content")
            if (
                item.get("role") == "assistant"
                and turn is not None
                and not turn["content"]
                and "tool_calls" not in turn
            ):
                turn["content"] = content  # after its reasoning
            else:
                messages.append({"role": item.get("role"), "content": content})
                turn = messages[-1] if item.get("role") == "assistant" else None
        else:
            raise GatewayError(f"{where}.type: an item of type '{str(kind)[:100]}' cannot be read", param=where)
    return messages


def _content(content: object, where: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    return [_part(part, place) for place, part in each_object(content, where)]


def _part(part: Json, where: str) -> Json:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        return {"type": "text", "text": text_of(text, f"{where}.text")}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": text_of(part.get("image_url"), f"{where}.image_url")}}
    raise GatewayError(f"{where}.type: a part of type '{str(kind)[:100]}' cannot be read", param=where)


def response_id(completion: Completion) -> str:
    """Returns the response id, for use as `previous_response_id`."""
    return f"resp_{completion.name}"


def conversation(completion: Completion) -> list[Json]:
    """Returns the messages up to and including the response, for which `previous_response_id` stands."""
    messages = [message for message in completion.request.messages if INSTRUCTIONS not in message]
    return [*messages, completion.turns[0].message]


def _items(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[Json]:
    """The turn's reasoning, its message, and its calls."""
    [turn] = completion.turns
    message, name = turn.message, completion.name
    items: list[Json] = []
    if thoughts := message.get("reasoning_content"):
        content: Json = {"type": "reasoning_text", "text": thoughts}
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [content]})
    if message["content"] or "tool_calls" not in message:
        listed = log_probs(turn, tokenizer) if completion.request.logprobs else []
        content = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": listed}
        items.append({"id": f"msg_{name}", "type": "message", "role": "assistant", "content": [content]})
    for number, call in enumerate(message.get("tool_calls", ())):
        items.append({"id": f"fc_{name}_{number}", "type": "function_call", "call_id": call["id"], **call["function"]})
    return [{**item, "status": "completed"} for item in items]


def _response(completion: Completion, status: str, output: list[Json]) -> Json:
    request = completion.request
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools or ()]
    choice = request.tool_choice or "auto"
    return {
        "id": response_id(completion),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": request.temperature,
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", **choice["function"]},
        "tools": tools,
        "top_p": request.top_p,
    }


def _answer(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Json:
    [turn] = completion.turns
    prompt, sampled = len(completion.prompt_ids), len(turn.parsed.output.token_ids)
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
    status = "incomplete" if turn.parsed.finish_reason == "length" else "completed"
    return _response(completion, status, _items(completion, tokenizer)) | {"usage": usage}


def _events(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Events:
    numbers = itertools.count()

    def event(name: str, /, **data: Any) -> tuple[str, Json]:
        kind = f"response.{name}"
        return kind, {"type": kind, "sequence_number": next(numbers), **data}

    for name in ("created", "in_progress"):
        yield event(name, response=_response(completion, "in_progress", []))
    answer = _answer(completion, tokenizer)
    for index, item in enumerate(answer["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "function_call":
            given = item["arguments"]
            yield event(
                "output_item.added", output_index=index, item={**item, "status": "in_progress", "arguments": ""}
            )
            yield event("function_call_arguments.delta", **at, delta=given)
            yield event("function_call_arguments.done", **at, name=item["name"], arguments=given)
        else:
            [part], at = item["content"], {**at, "content_index": 0}
            text, kind = part["text"], part["type"]
            listed: Json = {"logprobs": []} if kind == "output_text" else {}
            yield event("output_item.added", output_index=index, item={**item, "status": "in_progress", "content": []})
            yield event("content_part.added", **at, part={**part, "text": "", **listed})
            if text:
                yield event(f"{kind}.delta", **at, delta=text, **listed)
            yield event(f"{kind}.done", **at, text=text, **listed)
            yield event("content_part.done", **at, part=part)
        yield event("output_item.done", output_index=index, item=item)
    yield event(answer["status"], response=answer)


def _error_event(error: GatewayError) -> tuple[str, Json]:
    body = error.body()["error"]
    return "error", {"type": "error", "sequence_number": 0, **body, "error": body}


_NAMES = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
RESPONSES = Dialect("responses", _read, _answer, _events, GatewayError.body, _error_event, names=_NAMES)
