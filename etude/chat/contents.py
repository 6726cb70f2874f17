"""Where the contents of messages end up in a rendered conversation.

A chat template may trim, escape or wrap a content, so it cannot be found again by searching for its text. Each content
is therefore rendered between two marks, and the marks are taken out of the result.

Invariant: the text without its marks is what the template would have rendered without them. The marks are Unicode
noncharacters, which no text may contain; in a content that holds them all the same they become U+FFFD. White space
around a content stays outside the marks, so that a template which trims still trims.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

OPEN, CLOSE = "\ufdd0", "\ufdd1"
_WITHOUT_MARKS = str.maketrans({OPEN: "\ufffd", CLOSE: "\ufffd"})


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of a rendered text that belong to the content of message number `message`."""

    start: int
    end: int
    message: int


@dataclass(frozen=True)
class MarkedMessage:
    """A message ready to be rendered, and the texts that were marked in it, in order."""

    message: dict[str, Any]
    texts: tuple[str, ...]


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


def has_marks(text: str) -> bool:
    """Whether `text` holds one of the marks itself."""
    return OPEN in text or CLOSE in text


def mark(message: Message) -> MarkedMessage:
    """`message` with every text of its content marked; the parts of a list content are marked one by one."""
    copy = plain_message(message)
    content = copy.get("content")
    texts: tuple[str, ...] = ()
    if isinstance(content, str):
        texts = (content.translate(_WITHOUT_MARKS),)
        copy["content"] = _marked(texts[0])
    elif isinstance(content, Sequence):
        clean = [_clean_part(part) for part in content]
        texts = tuple(part["text"] for part in clean if _has_text(part))
        copy["content"] = [{**part, "text": _marked(part["text"])} if _has_text(part) else part for part in clean]
    else:
        copy["content"] = ""
    return MarkedMessage(copy, tuple(text for text in texts if text.strip()))


def _has_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _clean_part(part: Any) -> Any:
    return {**part, "text": part["text"].translate(_WITHOUT_MARKS)} if _has_text(part) else part


def _marked(text: str) -> str:
    core = text.strip()
    if not core:
        return text
    start = len(text) - len(text.lstrip())
    return f"{text[:start]}{OPEN}{core}{CLOSE}{text[start + len(core) :]}"


def unmark(rendered: str, messages: Iterable[MarkedMessage]) -> tuple[str, list[Span]]:
    """The rendered text without marks, and the span of each marked text in order.

    Raises:
        ValueError: a marked text is missing from, or repeated in, the rendered text.
    """
    marked = [(number, text) for number, message in enumerate(messages) for text in message.texts]
    first, *pieces = rendered.split(OPEN)
    if len(pieces) != len(marked) or any(piece.count(CLOSE) != 1 for piece in pieces) or CLOSE in first:
        raise ValueError("it does not write the content of every message exactly once")
    plain, position, spans = [first], len(first), []
    for piece, (number, text) in zip(pieces, marked):
        core, after = piece.split(CLOSE)
        lead, trail = _surrounding_space(text)
        # White space that the template kept around the content is the content's too.
        start = position - len(lead) if lead and plain[-1].endswith(lead) else position
        end = position + len(core) + (len(trail) if trail and after.startswith(trail) else 0)
        spans.append(Span(start, end, number))
        plain += [core, after]
        position += len(core) + len(after)
    return "".join(plain), spans


def _surrounding_space(text: str) -> tuple[str, str]:
    return text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
