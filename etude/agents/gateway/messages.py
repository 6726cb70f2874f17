"""A client's messages: checked, in the form that templates read, and in the form by which a history is known again.

Invariant: `History.keys[i]` is a digest of everything that messages 0 to i say to the model, together with tools and
sampling; two requests have the same key where, and only where, they tell the same history. Clients may drop what is empty,
add what is None, leave reasoning out, call `system` `developer`, name calls anew, write a text as a list of parts, put the
keys of a call's arguments in another order, or strip white space around what the model said: the history is the same. Two
answers that are swapped between the calls of a turn make another one.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from etude.agents.gateway.errors import GatewayError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
Message = dict[str, Any]


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with texts for contents, without keys that say nothing.

    Raises:
        GatewayError: one of them is malformed, or holds more than text; names it.
    """
    return [_plain(message, f"messages.{place}") for place, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], where: str) -> Message:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise GatewayError(400, f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    plain: Message = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str) and message[name]:
            plain[name] = message[name]
    if message.get("function_call"):
        raise GatewayError(400, f"{where}.function_call: use tool_calls", param=f"{where}.function_call")
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise GatewayError(400, f"{where}.tool_calls must be an assistant's list", param=f"{where}.tool_calls")
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls.{n}") for n, call in enumerate(calls)]
    return plain


def _text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise GatewayError(400, f"{where} must be a text or a list of parts", param=where)
    texts = []
    for place, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise GatewayError(400, f"{where}.{place}: only parts of type 'text' are read here", param=where)
        texts.append(text)
    return "".join(texts)


def _call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise GatewayError(400, f"{where} must have a function with a name", param=where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        raise GatewayError(400, f"{where}.function.arguments must be a text of JSON", param=where)
    made: Message = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    assert isinstance(call, Mapping)
    return made | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def answered(messages: Sequence[Message]) -> list[int | None]:
    """For each message the position of the call that it answers, among those of the assistant's message before it.

    It is found by the call's identifier in the messages themselves; of calls with one identifier, each is answered in turn.
    None for a message that is no tool's, or names no such call.
    """
    places: list[int | None] = []
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    for message in messages:
        if message["role"] == "assistant":
            waiting = defaultdict(list)
            for place, call in enumerate(message.get("tool_calls", ())):
                waiting[call.get("id", "")].append(place)
        named = message.get("tool_call_id") if message["role"] == "tool" else None
        calls = waiting.get(named, []) if named else []
        places.append(calls.pop(0) if len(calls) > 1 else next(iter(calls), None))
    return places


def likeness(one: Message, other: Message) -> tuple[int, int, int]:
    """In what two messages of an assistant agree that say the same: identifiers of calls, thoughts, exact words."""
    calls, theirs = one.get("tool_calls", ()), other.get("tool_calls", ())
    thoughts = [message.get("reasoning_content", "").strip() for message in (one, other)]
    return (
        int([call.get("id") for call in calls] == [call.get("id") for call in theirs]),
        int(thoughts[0] == thoughts[1]),
        int(one["content"] == other["content"] and _written(calls) == _written(theirs)),
    )


def _written(calls: Sequence[Message]) -> list[str]:
    return [call["function"]["arguments"] for call in calls]


class History:
    """The keys of a request's messages (see the module's invariant); `ground` is what else the prompt depends on."""

    def __init__(self, messages: Sequence[Message], ground: str) -> None:
        self.key = hashlib.blake2b(ground.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self.keys: list[bytes] = []
        for message, place in zip(messages, answered(messages)):
            self.keys.append(self.after(message, place))
            self.key = self.keys[-1]

    def after(self, message: Message, place: int | None = None) -> bytes:
        """The key of this history followed by `message`, which answers the call at `place`, if any."""
        said = json.dumps(_said(message, place)).encode()
        return hashlib.blake2b(self.key + said, digest_size=16).digest()


def _said(message: Message, place: int | None) -> list[Any]:
    role, content = message["role"], message["content"]
    if role != "assistant":
        return [role, content, message.get("name"), place]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [role, content.strip(), [[function["name"], _ordered(function["arguments"])] for function in functions]]


def _ordered(arguments: str) -> str:
    """JSON with its keys in order; what is no JSON as it is."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
