"""The Hermes format, also Qwen's: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Invariant: every `<tool_call>` outside reasoning is a call or an error, in the order written. Reasoning is what stands
between `<think>` and `</think>`, what follows a `<think>` that is never closed, and, where the text has no `<think>`
before it, what precedes the first `</think>` (the prompt opened that thought). A tag inside a JSON string is text.
Reading takes linear time on any input.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from etude.chat.parsers.base import ParsedResponse, ToolParser, Tools
from etude.schemas import FunctionCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _UNTHINK = "<think>", "</think>"
_OUTSIDE = re.compile(r"<tool_call>|</?think>")
_IN_BLOCK = re.compile(r'["\\]|</?tool_call>')
_STRING_END = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_TAG = re.compile(r"</?tool_call>")
_EXAMPLE = '{"name": "...", "arguments": {...}}'


class _Unreadable(Exception):
    """A block is no call; the text tells the model why."""


@ToolParser.register("hermes", "qwen")
class HermesToolParser(ToolParser):
    """Parser of JSON calls in `<tool_call>` tags; valid JSON only, nothing is repaired."""

    def parse(self, text: str, tools: Tools | None = None) -> ParsedResponse:
        """Content (everything outside the blocks, reasoning included, stripped), calls and errors of a turn."""
        content: list[str] = []
        calls: list[FunctionCall] = []
        errors: list[str] = []
        position = 0
        may_close = True
        while found := _OUTSIDE.search(text, position):
            tag = found.group()
            if tag == _THINK:
                end = text.find(_UNTHINK, found.end())
                end = len(text) if end < 0 else end + len(_UNTHINK)
                content.append(text[position:end])
                may_close = False
            elif tag == _UNTHINK:
                end = found.end()
                content.append(text[position:end])
                if may_close:
                    content, calls, errors = [text[:end]], [], []
                    may_close = False
            else:
                content.append(text[position : found.start()])
                body, end = _block(text, found.end())
                try:
                    calls.append(_read_call(body))
                except _Unreadable as reason:
                    errors.append(f"tool call {len(calls) + len(errors) + 1} was not read: {reason}")
            position = end
        content.append(text[position:])
        return ParsedResponse("".join(content).strip(), calls, errors)


def _block(text: str, start: int) -> tuple[str | None, int]:
    """Body of the block whose opening tag ends at `start` (None when it is never closed), and where to read on."""
    tag = _closing_tag(text, start) or _TAG.search(text, start)
    if tag is None:
        return None, len(text)
    if tag.group() == _OPEN:
        return None, tag.start()
    return text[start : tag.start()], tag.end()


def _closing_tag(text: str, start: int) -> re.Match[str] | None:
    """The `</tool_call>` that ends a JSON text beginning at `start`, skipping its strings; None if it is no JSON.

    A backslash outside a string ends the search: it keeps hostile text from making every block scan to the end.
    """
    position = start
    while mark := _IN_BLOCK.search(text, position):
        if mark.group() == '"':
            string = _STRING_END.match(text, mark.end())
            if string is None:
                return None
            position = string.end()
        else:
            return mark if mark.group() == _CLOSE else None
    return None


def _read_call(body: str | None) -> FunctionCall:
    if body is None:
        raise _Unreadable("it is not closed; end it with </tool_call>")
    call = _decode(body)
    if not isinstance(call, dict):
        raise _Unreadable(f"it must hold one JSON object {_EXAMPLE}")
    name = call.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _Unreadable('"name" is missing or is not a string')
    if "arguments" not in call:
        raise _Unreadable('"arguments" is missing; write "arguments": {} for none')
    arguments = call["arguments"]
    if isinstance(arguments, str):
        arguments = _decode_or_none(arguments)
    if not isinstance(arguments, dict):
        raise _Unreadable('"arguments" must be a JSON object')
    return _function_call(name.strip(), arguments)


def _decode(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise _Unreadable(f"invalid JSON, {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _Unreadable("invalid JSON, it is nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise _Unreadable("invalid JSON, a number is out of range") from None


def _decode_or_none(text: str) -> Any:
    try:
        return _decode(text)
    except _Unreadable:
        return None


def _refuse(constant: str) -> NoReturn:
    raise _Unreadable(f"invalid JSON, {constant} is not allowed")


def _function_call(name: str, arguments: dict[str, Any]) -> FunctionCall:
    try:
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + encoded).encode("utf-8")
    except UnicodeEncodeError:
        raise _Unreadable("invalid JSON, half of a surrogate pair is not a character") from None
    except RecursionError:
        raise _Unreadable("invalid JSON, it is nested too deeply") from None
    except ValueError:  # 1e999 decodes to infinity
        raise _Unreadable("invalid JSON, a number is out of range") from None
    return FunctionCall(name=name, arguments=encoded)
