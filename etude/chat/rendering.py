"""`Renderer`: renders messages to text with a tokenizer's chat template; and the form of messages that templates expect.

Invariant: every rendering has the same options, and messages in that form (`plain_message`): a content is a string, or a
list of parts of which some have a text. Any failure in a template becomes a one-line error.

A tokenizer may have a separate template for conversations with tools (`tool_use`; Hermes and Command R do), and a template
may always require tools. Messages after a turn are rendered after a stub, without the row's tools; a stand-in tool replaces
them if there are tool messages, or if the template requires tools (`stub_text`). `IncrementalRenderer` rejects templates
that write the stand-in's name after a turn, where the model would see it.

What was rendered is kept in an `LRUCache`, under the `rendering_key` of its messages.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from etude.errors import ConfigError, DataError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAND_IN = "etude_stand_in_for_any_tool"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": STAND_IN,
        "description": "Stands for any tool.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where"},
                "days": {"type": "integer", "description": "how many"},
            },
            "required": ["city", "days"],
        },
    },
}
"""The tool with which templates are tested."""
Message = Mapping[str, Any]
T = TypeVar("T")


def plain_message(message: Message) -> dict[str, Any]:
    """Returns a copy without None keys, and with tool-call arguments decoded if they are a JSON object.

    Rows read from parquet have None for every key that another row has; templates test whether a key exists.
    """
    copy = {key: value for key, value in message.items() if value is not None or key == "content"}
    if copy.get("tool_calls"):
        copy["tool_calls"] = [_with_arguments(call, _as_object) for call in copy["tool_calls"]]
    return copy


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
    except (ValueError, RecursionError):
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


def clean_message(message: Message, change: Callable[[str], str] = str) -> dict[str, Any]:
    """Returns a copy whose content is a string or parts, with every text in it replaced by `change(text)`."""
    content = message.get("content")
    if isinstance(content, str):
        content = change(content)
    elif isinstance(content, Sequence):
        content = [{**part, "text": change(part["text"])} if _has_text(part) else part for part in content]
    else:
        content = ""
    return {**message, "content": content}


def texts_of(message: Message) -> list[str]:
    """Returns the texts of a clean message: its content, or the texts of its parts."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if _has_text(part)]


def with_texts(messages: Iterable[Message], texts: Iterable[str]) -> list[dict[str, Any]]:
    """Replaces the texts of clean messages by `texts`, in order."""
    left = iter(texts)
    return [clean_message(each, lambda _: next(left)) for each in messages]


def _has_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


class Renderer:
    """The chat template of `tokenizer`, rendered with `options`; `rewrite(messages, tools)` replaces the messages by ones
    that show tools, calls and results in plain text (`ToolPrompt`), so that the template gets no tools."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any],
        rewrite: Callable[[list[dict[str, Any]], Sequence[dict[str, Any]] | None], list[dict[str, Any]]] | None = None,
    ) -> None:
        self.tokenizer, self.options, self._rewrite = tokenizer, options, rewrite

    def text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, *, generate: bool
    ) -> str:
        """Renders `messages`, with the generation prompt if `generate`.

        Call arguments are passed as objects or, for templates that reject those (DeepSeek's), as JSON strings.

        Raises:
            ConfigError: the template rejects the messages.
        """
        plain = [plain_message(message) for message in messages]
        try:
            return self.text_as_given(plain, tools, generate=generate)
        except Exception as error:  # a template may raise anything
            with_texts = [
                {**message, "tool_calls": [_with_arguments(call, _as_text) for call in message["tool_calls"]]}
                if message.get("tool_calls")
                else message
                for message in plain
            ]
            if with_texts != plain:
                with suppress(Exception):
                    return self.text_as_given(with_texts, tools, generate=generate)
            raise ConfigError(f"the chat template refuses the messages: {one_line(error)}") from error

    def text_as_given(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, *, generate: bool
    ) -> str:
        """Like `text`, but with the messages as given; may raise any exception."""
        if self._rewrite is not None:
            messages, tools = self._rewrite(messages, tools), None
        return self.tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=generate,
            **self.options,
        )

    def stub_text(self, messages: Sequence[Message], *, generate: bool) -> str:
        """Renders a stub conversation, with a stand-in tool if necessary.

        Raises:
            ConfigError: the template rejects the messages.
        """
        return self.text(messages, self.stand_in_for(messages), generate=generate)

    def stand_in_for(self, messages: Sequence[Message]) -> list[dict[str, Any]] | None:
        """Returns the tools of a stub conversation: `PROBE_TOOL` if the template for tools applies, or requires tools."""
        if self._rewrite is not None:
            return None
        if self._requires_tools:
            return [PROBE_TOOL]
        template = self.tokenizer.chat_template
        if not isinstance(template, Mapping) or "tool_use" not in template or "chat_template" in self.options:
            return None
        uses_tools = any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)
        return [PROBE_TOOL] if uses_tools else None

    @cached_property
    def _requires_tools(self) -> bool:
        """Whether the template renders a question only with tools."""
        for tools in (None, [PROBE_TOOL]):
            try:
                self.text([{"role": "user", "content": "A question."}], tools, generate=True)
            except ConfigError:
                continue
            return tools is not None
        return False

    def shows_tools(self, *, system: bool = False) -> bool | None:
        """Whether a prompt of one question, with `system` of one below a system message, shows the model its tools; None if
        the template refuses to render it."""
        messages = [{"role": "system", "content": "Be brief."}] * system + [{"role": "user", "content": "A question."}]
        try:
            return STAND_IN in self.text(messages, [PROBE_TOOL], generate=True)
        except ConfigError:
            return None

    def text_of_row(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, *, generate: bool
    ) -> str:
        """Like `text`, for a row's messages.

        Raises:
            DataError: the template rejects them.
        """
        try:
            return self.text(messages, tools, generate=generate)
        except ConfigError as error:
            raise DataError(str(error)) from error


class LRUCache(Generic[T]):
    """Holds the `limit` most recently used values."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: str | None) -> T | None:
        """Returns the value under `key` and marks it as used; None if there is none."""
        if key is None or key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def put(self, key: str | None, value: T) -> None:
        """Stores `value` and evicts the least recently used one if full; does nothing if the key is None."""
        if key is None:
            return
        self._held[key] = value
        if len(self._held) > self._limit:
            self._held.popitem(last=False)


def rendering_key(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> str | None:
    """Returns a cache key of messages and tools; None if they are not JSON-serializable."""
    try:
        return json.dumps([messages, tools])
    except (TypeError, ValueError, RecursionError):
        return None
