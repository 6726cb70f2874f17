"""`Renderer`: messages to the text that a tokenizer's chat template writes for them.

Invariant: every rendering has the same options, and messages as templates expect them (`plain_message`). Whatever goes
wrong in a template is one line that says so. Which renderings can be spared is left to `forms`.

A tokenizer may have a template of its own for conversations with tools (`tool_use`, as Hermes' and Command R's have), and a
template may want tools at all times. What follows a turn is rendered behind a stub, without the row's tools: there one tool
stands in for them (`stub_text`), so that its template writes the answers, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from etude.chat.contents import Message, plain_message, with_text_arguments
from etude.errors import ConfigError, DataError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STAND_IN = {
    "type": "function",
    "function": {
        "name": "stand_in",
        "description": "Stands for any tool.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "any"}},
            "required": [],
        },
    },
}


class Renderer:
    """The chat template of `tokenizer`, rendered with `options`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
        self.tokenizer, self.options = tokenizer, options

    def text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, *, generate: bool
    ) -> str:
        """The text of `messages`, with the generation prompt where `generate`.

        Arguments of calls are objects or, for templates that take none (DeepSeek's), JSON texts.

        Raises:
            ConfigError: the template refuses the messages.
        """
        plain = [plain_message(message) for message in messages]
        try:
            return self._rendered(plain, tools, generate)
        except Exception as error:  # a template raises whatever its expressions raise
            with_texts = [with_text_arguments(message) for message in plain]
            if with_texts != plain:
                with suppress(Exception):
                    return self._rendered(with_texts, tools, generate)
            raise ConfigError(f"the chat template refuses the messages: {one_line(error)}") from error

    def _rendered(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, generate: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=generate,
            **self.options,
        )

    def stub_text(self, messages: Sequence[Message], *, generate: bool) -> str:
        """`text` of a conversation that stands for those of rows with tools, whichever these are.

        Raises:
            ConfigError: the template refuses the messages.
        """
        return self.text(messages, self.stand_in, generate=generate)

    @cached_property
    def stand_in(self) -> list[dict[str, Any]] | None:
        """The tools of conversations that stand for others; None where they are rendered as those of rows without tools."""
        template = self.tokenizer.chat_template
        if isinstance(template, Mapping) and "chat_template" not in self.options:
            return [_STAND_IN] if "tool_use" in template else None
        for tools in (None, [_STAND_IN]):
            try:
                self.text([{"role": "user", "content": "A question."}], tools, generate=True)
            except ConfigError:
                continue
            return tools
        return None

    def text_of_row(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, *, generate: bool
    ) -> str:
        """`text` of messages that are a row's.

        Raises:
            DataError: the template refuses them.
        """
        try:
            return self.text(messages, tools, generate=generate)
        except ConfigError as error:
            raise DataError(str(error)) from error
