"""`Renderer`: messages to the text that a tokenizer's chat template writes for them.

Invariant: every rendering has the same options, and messages as templates expect them (`plain_message`). Whatever goes
wrong in a template is one line that says so. Which renderings can be spared is left to `forms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etude.chat.contents import Message, plain_message
from etude.errors import ConfigError, DataError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Renderer:
    """The chat template of `tokenizer`, rendered with `options`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
        self.tokenizer, self.options = tokenizer, options

    def text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, *, generate: bool
    ) -> str:
        """The text of `messages`, with the generation prompt where `generate`.

        Raises:
            ConfigError: the template refuses the messages.
        """
        try:
            return self.tokenizer.apply_chat_template(
                [plain_message(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=generate,
                **self.options,
            )
        except Exception as error:  # a template raises whatever its expressions raise
            raise ConfigError(f"the chat template refuses the messages: {one_line(error)}") from error

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
