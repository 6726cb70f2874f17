"""Messages as chat templates expect them, and the texts of their contents.

A content is a text, or a list of parts of which some have a text. Templates may trim, escape or wrap a text, so that it
cannot be found again by searching for it: it is rendered between two marks, Unicode noncharacters that no text may contain.
White space around the words (`around`) stays outside, so that a template which trims still trims.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

OPEN, CLOSE = "\ufdd0", "\ufdd1"


def plain_message(message: Message) -> dict[str, Any]:
    """A copy as templates expect it: no empty keys, and tool-call arguments decoded where they are an object's JSON.

    Rows read from parquet hold None for every key that another row has; templates ask whether a key exists.
    """
    copy = {key: value for key, value in message.items() if value is not None or key == "content"}
    if copy.get("tool_calls"):
        copy["tool_calls"] = [_with_arguments(call, _as_object) for call in copy["tool_calls"]]
    return copy


def with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """A plain message with the arguments of its calls as JSON text."""
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
    """A plain message whose content is a text or parts; noncharacters that are the marks become U+FFFD."""
    copy = plain_message(message)
    copy["content"] = _with_each_text(copy.get("content"), _without_marks)
    return copy


def texts_of(message: Message) -> list[str]:
    """The texts of a clean message: its content, or those of its parts."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if _has_text(part)]


def with_texts(messages: Iterable[Message], texts: Iterable[str]) -> list[dict[str, Any]]:
    """Clean messages with other texts, one for each of theirs."""
    left = iter(texts)
    return [{**each, "content": _with_each_text(each["content"], lambda _: next(left))} for each in messages]


def around(text: str) -> tuple[str, str, str]:
    """(white space, words, white space) of a text."""
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
