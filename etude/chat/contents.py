"""Converts messages to the form that chat templates expect, and reads and replaces the texts of their contents.

A content is a string, or a list of parts of which some have a text. Templates may trim, escape or wrap a text, so that
searching for it fails; to locate it, it is rendered between two marks, Unicode noncharacters that no text may contain. White
space around the words (`around`) stays outside the marks, so that a template that trims still trims.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

OPEN, CLOSE = "\ufdd0", "\ufdd1"


def plain_message(message: Message) -> dict[str, Any]:
    """Returns a copy without None keys, and with tool-call arguments decoded if they are a JSON object.

    Rows read from parquet have None for every key that another row has; templates test whether a key exists.
    """
    copy = {key: value for key, value in message.items() if value is not None or key == "content"}
    if copy.get("tool_calls"):
        copy["tool_calls"] = [_with_arguments(call, _as_object) for call in copy["tool_calls"]]
    return copy


def with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plain message with its calls' arguments as JSON strings."""
    calls = message.get("tool_calls") or ()
    return {**message, "tool_calls": [_with_arguments(call, _as_text) for call in calls]} if calls else dict(message)


def _with_arguments(call: Mapping[str, Any], changed: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], changed)}
    return {**call, "arguments": changed(call.get("arguments"))}


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded = json.loads(arguments)
    except ValueError:
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


def clean_message(message: Message) -> dict[str, Any]:
    """Returns a plain message whose content is a string or parts, with the marks in its texts replaced by U+FFFD."""
    copy = plain_message(message)
    copy["content"] = _with_each_text(copy.get("content"), _without_marks)
    return copy


def texts_of(message: Message) -> list[str]:
    """Returns the texts of a clean message: its content, or the texts of its parts."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if _has_text(part)]


def with_texts(messages: Iterable[Message], texts: Iterable[str]) -> list[dict[str, Any]]:
    """Replaces the texts of clean messages by `texts`, in order."""
    left = iter(texts)
    return [{**each, "content": _with_each_text(each["content"], lambda _: next(left))} for each in messages]


def around(text: str) -> tuple[str, str, str]:
    """Splits a text into (leading white space, words, trailing white space)."""
    words = text.strip()
    lead, _, trail = text.partition(words) if words else (text, "", "")
    return lead, words, trail


def _with_each_text(content: Any, change: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return change(content)
    if isinstance(content, Sequence):
        return [{**part, "text": change(part["text"])} if _has_text(part) else part for part in content]
    return ""


def _has_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _without_marks(text: str) -> str:
    return text.replace(OPEN, "\ufffd").replace(CLOSE, "\ufffd")
