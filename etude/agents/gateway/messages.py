"""Validates a client's messages, converts them to the form that chat templates read, and hashes each history to a key.

Invariant: `History.keys[i]` is a digest of everything that messages 0 to i say to the model, together with tools and
sampling; two requests have the same key if and only if they have the same history. A history stays the same if the client
drops empty values, adds None, omits reasoning, calls `system` `developer`, renames call ids, writes text as a list of
parts, reorders the keys of a call's arguments, or strips whitespace around the model's text. Swapping two tool results
between the calls of a turn makes a different history, and so does an image with different bytes. Reasoning is in no key,
since it may be omitted; `edits_reasoning` detects edited reasoning.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from etude.agents.gateway.wire import GatewayError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
Message = dict[str, Any]


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], list[list[str]]]:
    """Returns (messages without empty keys, whose content is a string or, with images, a list of parts; the `data:` URLs of
    each message's images).

    Raises:
        GatewayError: a message is malformed, has a part that is neither text nor image, or has images in a role other than
            user or tool; names the message.
    """
    read = [_plain(message, f"messages.{place}") for place, message in enumerate(messages)]
    return [message for message, _ in read], [images for _, images in read]


def _plain(message: Mapping[str, Any], where: str) -> tuple[Message, list[str]]:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise GatewayError(400, f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    content, images = _content(message.get("content"), f"{where}.content")
    if images and role not in ("user", "tool"):
        reason = f"{where}.content: only messages of users and tools show images"
        raise GatewayError(400, reason, param=f"{where}.content")
    plain: Message = {"role": role, "content": content}
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
    return plain, images


def _content(content: object, where: str) -> tuple[str | list[Message], list[str]]:
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, list):
        raise GatewayError(400, f"{where} must be a text or a list of parts", param=where)
    parts: list[Message] = []
    images: list[str] = []
    for place, part in enumerate(content):
        given: Mapping[str, Any] = part if isinstance(part, Mapping) else {}
        text = given.get("text")
        if given.get("type") == "image_url":
            images.append(_address(given.get("image_url"), f"{where}.{place}"))
            parts.append({"type": "image"})
        elif given.get("type") == "text" and isinstance(text, str):
            if parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += text
            elif text:
                parts.append({"type": "text", "text": text})
        else:
            reason = f"{where}.{place}: only parts of type 'text' and 'image_url' are read"
            raise GatewayError(400, reason, param=where)
    return parts if images else "".join(part["text"] for part in parts), images


def _address(image: object, where: str) -> str:
    address = image.get("url") if isinstance(image, Mapping) else None
    if not isinstance(address, str) or not address.startswith("data:image/"):
        raise GatewayError(
            400, f"{where}: an image is given as a 'data:image/' address; nothing is fetched", param=where
        )
    return address


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


def match_answers(messages: Sequence[Message]) -> list[int | None]:
    """Returns, for each message, the index of the tool call it answers among those of the preceding assistant message.

    Calls are matched by their ids in the messages themselves; calls that share an id are answered in order. None for a
    message that is not a tool's, or that names no such call.
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
    """Whether two equivalent assistant messages agree in (call ids, reasoning, exact text), each 0 or 1."""
    calls, theirs = one.get("tool_calls", ()), other.get("tool_calls", ())
    thoughts = [message.get("reasoning_content", "").strip() for message in (one, other)]
    return (
        int([call.get("id") for call in calls] == [call.get("id") for call in theirs]),
        int(thoughts[0] == thoughts[1]),
        int(one["content"] == other["content"] and _arguments(calls) == _arguments(theirs)),
    )


def edits_reasoning(sent: Message, message: Message) -> bool:
    """Whether a client changed a turn's reasoning; omitting it is not a change."""
    thoughts = sent.get("reasoning_content", "").strip()
    return bool(thoughts) and thoughts != message.get("reasoning_content", "").strip()


def _arguments(calls: Sequence[Message]) -> list[str]:
    return [call["function"]["arguments"] for call in calls]


class History:
    """The keys of a request's messages and their images' digests (see the module's invariant); `ground` identifies
    everything else that the prompt depends on."""

    def __init__(self, messages: Sequence[Message], images: Sequence[Sequence[bytes]], ground: str) -> None:
        self.key = hashlib.blake2b(ground.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self.keys: list[bytes] = []
        for message, shown, place in zip(messages, images, match_answers(messages)):
            self.keys.append(self.after(message, place, shown))
            self.key = self.keys[-1]

    def after(self, message: Message, place: int | None = None, images: Sequence[bytes] = ()) -> bytes:
        """Returns the key of this history plus `message`, which answers the call at `place`, if any, and has `images`."""
        fields = json.dumps(_key_fields(message, place)).encode()
        return hashlib.blake2b(b"".join([self.key, fields, *images]), digest_size=16).digest()


def _key_fields(message: Message, place: int | None) -> list[Any]:
    role, content = message["role"], message["content"]
    if role != "assistant":
        return [role, content, message.get("name"), place]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [role, content.strip(), [[function["name"], _sort_keys(function["arguments"])] for function in functions]]


def _sort_keys(arguments: str) -> str:
    """Sorts the keys of a JSON text; returns anything else unchanged."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
