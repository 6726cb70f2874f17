"""Models, tokenizers and image processors: loading, saving, packed attention, value head, vision, and the tiny-model
factory. Nothing here trains."""

from etude.models.loading import (
    check_vocabulary,
    is_sequence_classifier,
    load_causal_lm,
    load_sequence_classifier,
    load_tokenizer,
    load_value_model,
    model_config,
    save_pretrained,
    torch_dtype,
)
from etude.models.processor import image_input, load_processor
from etude.models.reader import ImageReader
from etude.models.tiny import TinyModelSpec, build_tiny_model, build_tiny_tokenizer
from etude.models.value import ValueModel

__all__ = [
    "ImageReader",
    "TinyModelSpec",
    "ValueModel",
    "build_tiny_model",
    "build_tiny_tokenizer",
    "check_vocabulary",
    "image_input",
    "is_sequence_classifier",
    "load_causal_lm",
    "load_processor",
    "load_sequence_classifier",
    "load_tokenizer",
    "load_value_model",
    "model_config",
    "save_pretrained",
    "torch_dtype",
]
