"""`TokenizerBundle`: a model's tokenizer, chat template and, for a vision model, image processor.

Invariant: the trainer, which measures prompts, and the workers, which roll them out, build identical bundles from the same
options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etude.chat import ChatTemplate, ToolParser
from etude.errors import ConfigError
from etude.models import ImageReader, load_processor, load_tokenizer
from etude.options import ModelOptions, MultiTurnOptions


@dataclass(frozen=True)
class TokenizerBundle:
    """`processor` (from Hugging Face) and `images` are None for a text-only model."""

    tokenizer: Any
    chat: ChatTemplate
    processor: Any = None
    images: ImageReader | None = None


def load_tokenizer_bundle(
    model: ModelOptions, template_kwargs: Mapping[str, Any], multi_turn: MultiTurnOptions
) -> TokenizerBundle:
    """Loads the bundle of `model.path`; `template_kwargs` are passed to every rendering of the chat template.

    Raises:
        ConfigError: the path is not set, or its tokenizer, chat template or image processor is missing or broken.
    """
    if model.path is None:
        raise ConfigError("actor_rollout_ref.model.path is not set", fix="give the folder of a Hugging Face model")
    processor = load_processor(model.path, trust_remote_code=model.trust_remote_code)
    if processor is None:
        tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        return TokenizerBundle(tokenizer, _template(model.path, tokenizer, multi_turn, **template_kwargs))
    chat = _template(model.path, processor.tokenizer, multi_turn, processor=processor, **template_kwargs)
    return TokenizerBundle(processor.tokenizer, chat, processor, ImageReader(processor))


def _template(path: str, tokenizer: Any, multi_turn: MultiTurnOptions, **options: Any) -> ChatTemplate:
    parser = ToolParser.get_tool_parser(multi_turn.format, tokenizer) if multi_turn.tools_in_system else None
    try:
        return ChatTemplate(tokenizer, tools_in_system=parser, **options)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
