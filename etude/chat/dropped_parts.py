"""`DroppedParts`: finds message parts that a chat template silently drops.

A template without tool calls renders an assistant's call as an empty turn; the same can happen to text next to a call, or to
reasoning. To test a part, it is changed: if the rendered text does not change, the part is dropped.

Invariant: a part reported as dropped has no effect on the text; conversations of one shape (roles, the parts of each
message, the names of call arguments) are tested once. Reasoning that the template drops only because of its position, as
many do before the last question, is the template's policy and not dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from etude.chat.rendering import LRUCache, Message, Renderer, plain_message
from etude.chat.turns import USER_STUB
from etude.errors import ConfigError

_REASONING = ("reasoning_content", "reasoning", "thinking")  # templates differ in the key that they read
_OTHERS = ("content", "tool_plan", "function_call")
_CHANGE = " qzxv"
_SHAPES_KEPT = 1024


class DroppedParts:
    """Finds the parts that one template drops."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._whole = LRUCache[bool](_SHAPES_KEPT)

    def of_prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> tuple[int, str] | None:
        """Returns the first part that a prompt loses, as (message number, name such as "tool_calls[0].city"), or None.

        Raises:
            DataError: the template rejects the messages.
        """
        return self._find([plain_message(message) for message in messages], tools, generate=True)

    def of_turn(self, message: Message) -> str | None:
        """Returns the name of the first part that the template drops from a single assistant turn, or None.

        Raises:
            DataError: the template rejects the message.
        """
        tools = self._renderer.stand_in_for([message])
        dropped = self._find([dict(USER_STUB), plain_message(message)], tools, generate=False)
        return None if dropped is None else dropped[1]

    def _find(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, *, generate: bool
    ) -> tuple[int, str] | None:
        shapes = ([message.get("role"), *(name for name, _ in _changes(message))] for message in messages)
        shape = repr([generate, bool(tools), *shapes])
        if self._whole.get(shape):
            return None
        text = self._renderer.text_of_row(messages, tools, generate=generate)
        for number, message in enumerate(messages):
            for name, changed in _changes(message):
                other = [*messages[:number], changed, *messages[number + 1 :]]
                if self._changes_text(text, other, tools, generate=generate):
                    continue
                if not self._is_policy(name, message, changed, tools):
                    return number, name
        self._whole.put(shape, True)
        return None

    def _changes_text(
        self, text: str, other: Sequence[Message], tools: Sequence[dict[str, Any]] | None, *, generate: bool
    ) -> bool:
        try:
            return self._renderer.text(other, tools, generate=generate) != text
        except ConfigError:  # the changed part made the template fail, so the template reads it
            return True

    def _is_policy(self, name: str, message: Message, changed: Message, tools: Sequence[dict[str, Any]] | None) -> bool:
        """Whether the template drops reasoning only because of its position, that is, renders it in a last turn."""
        if name not in _REASONING or message["role"] != "assistant":
            return False
        with suppress(ConfigError):
            text = self._renderer.text([USER_STUB, message], tools, generate=False)
            return self._changes_text(text, [USER_STUB, changed], tools, generate=False)
        return False


def _changes(message: Message) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, copy of the message with that part changed) for each non-empty part."""
    for name in _OTHERS:
        if (changed := _changed(message.get(name))) is not None:
            yield name, {**message, name: changed}
    if thoughts := {name: changed for name in _REASONING if (changed := _changed(message.get(name))) is not None}:
        yield next(iter(thoughts)), {**message, **thoughts}
    calls = message.get("tool_calls") or []
    for place, call in enumerate(calls):
        function = call.get("function") or call
        arguments = function.get("arguments")
        changes: list[tuple[str, dict[str, Any]]] = [("", {"name": f"{function.get('name')}_qzxv"})]
        if isinstance(arguments, dict):
            changes += [
                (f".{key}", {"arguments": {**arguments, key: _other_value(arguments[key])}}) for key in arguments
            ]
        for suffix, change in changes:
            made = {**call, "function": {**function, **change}} if "function" in call else {**call, **change}
            yield f"tool_calls[{place}]{suffix}", {**message, "tool_calls": [*calls[:place], made, *calls[place + 1 :]]}


def _changed(value: Any) -> Any:
    """Returns a changed value; None if the value is empty."""
    if isinstance(value, str):
        return value.rstrip() + _CHANGE if value.strip() else None
    if isinstance(value, list):  # content parts: changes the last text
        texts = [n for n, part in enumerate(value) if isinstance(part, dict) and str(part.get("text") or "").strip()]
        if not texts:
            return None
        part = value[texts[-1]]
        return [*value[: texts[-1]], {**part, "text": part["text"].rstrip() + _CHANGE}, *value[texts[-1] + 1 :]]
    return {"name": _CHANGE.strip(), "arguments": "{}"} if value else None


def _other_value(value: Any) -> Any:
    """Returns a different value of the same type, since templates treat strings and numbers differently."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return value + _CHANGE if isinstance(value, str) else _CHANGE.strip()
