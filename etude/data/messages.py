"""Chat messages in data files.

Invariant: a message list returned by `check_messages` can be passed to a chat template: known roles, content that is
text or a list of text and image parts, tool calls in OpenAI's form with decoded arguments, and no null-valued keys (a
template treats null as a value). Matching image parts to images, inline (`image`) or not, is left to `images`.
"""

from __future__ import annotations

import json
from typing import Any

from etude.data.files import without_nulls
from etude.errors import DataError
from etude.registry import did_you_mean

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(value: object, where: str, *, images: bool = False) -> list[Message]:
    """Validates and normalises the messages in `value`; `where` names the file, row and column for errors, `images`
    allows image parts.

    Raises:
        DataError: not a non-empty list of {role, content}, an unknown role, content that is not text, or a bad tool call.
    """
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise DataError(f"{where} must be a non-empty list of {{role, content}} messages, got {found}")
    return [_check_message(message, f"{where}[{number}]", images) for number, message in enumerate(value)]


def _check_message(value: object, where: str, images: bool) -> Message:
    if not isinstance(value, dict):
        raise DataError(f"{where} must be a {{role, content}} message, got {type(value).__name__}")
    message: Message = without_nulls(value)
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"{where} has the unknown role {role!r}{did_you_mean(str(role), ROLES)}")
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise DataError(f"{where}.tool_calls must be a list, got {type(calls).__name__}")
        message["tool_calls"] = [_check_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
        message.setdefault("content", "")
    else:
        message.pop("tool_calls", None)
    content = message.get("content")
    if isinstance(content, list) and content:
        parts = [_check_part(part, f"{where} ({role})", images) for part in content]
        plain = all(part["type"] == "text" for part in parts)
        message["content"] = "".join(part["text"] for part in parts) if plain else parts
    elif not isinstance(content, str):
        raise DataError(f"{where} ({role}) needs 'content' as text, got {type(content).__name__}")
    return message


def _check_part(value: object, where: str, images: bool) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind == "text" and isinstance(value.get("text"), str):
        return {"type": "text", "text": value["text"]}
    if isinstance(value, dict) and kind == "image" and images and value.keys() <= {"type", "image"}:
        return value
    allowed = "{type: text, text} or {type: image, image?}" if images else "{type: text, text}"
    raise DataError(f"{where}: a part of 'content' must be {allowed}, got {kind or type(value).__name__}")


def _check_call(value: object, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} must be {{type: function, function: {{name, arguments}}}}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: 'arguments' is not valid JSON") from error
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: 'arguments' must be an object, got {type(arguments).__name__}")
    return value | {"function": function | {"arguments": arguments}}
