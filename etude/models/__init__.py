"""Models and tokenizers: loading, saving, the value head, and the tiny-model factory. Nothing here trains."""

from etude.models.loading import check_vocabulary, load_causal_lm, load_tokenizer, load_value_model, save_pretrained
from etude.models.tiny import TinyModelSpec, build_tiny_model, build_tiny_tokenizer
from etude.models.value import ValueModel

__all__ = [
    "TinyModelSpec",
    "ValueModel",
    "build_tiny_model",
    "build_tiny_tokenizer",
    "check_vocabulary",
    "load_causal_lm",
    "load_tokenizer",
    "load_value_model",
    "save_pretrained",
]
