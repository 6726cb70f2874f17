"""The tiny-model factory: a tokenizer and a model (Qwen3 by default) small enough to train on a CPU in minutes.

Invariant: results depend only on the arguments. The same texts and vocabulary size give the same tokenizer, the same spec
and tokenizer give the same weights, whatever ran before; the caller's random state is unchanged.

The chat template (`tiny_chat_template.jinja`) renders Qwen's turns with a compact list of tools, because a model with less
than a million parameters has to read it. The tokenizer's training texts come from the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from etude.errors import ConfigError
from etude.registry import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD_TOKEN = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
BYTES = 256
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "qwen3_moe")
_ALTERNATING = ("qwen2", "qwen3", "gemma2", "gemma3_text")  # sliding window on every other layer; Mistral: on all
_WINDOWED = ("mistral", *_ALTERNATING)


@dataclass(frozen=True)
class TinyModelSpec:
    """Sizes and seed of a tiny model; `vocab_size` is the maximum number of tokens of its tokenizer.

    The model's embedding has exactly as many rows as the tokenizer has tokens, so that every sampled id has a text.
    `architecture` is a Transformers model type; `sliding_window` is in tokens (None: full attention). A mixture of experts
    has `num_experts`, each of width `intermediate_size`.
    """

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 384
    vocab_size: int = 512
    max_position_embeddings: int = 1024
    seed: int = 0
    architecture: str = "qwen3"
    sliding_window: int | None = None
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    num_experts: int = 4
    num_experts_per_tok: int = 2

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ConfigError(
                f"hidden_size {self.hidden_size} over num_heads {self.num_heads} must be an even whole head size"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.architecture not in ARCHITECTURES:
            near = did_you_mean(self.architecture, ARCHITECTURES)
            raise ConfigError(
                f"no tiny model of architecture '{self.architecture}'{near} (known: {', '.join(ARCHITECTURES)})"
            )
        if self.sliding_window is not None and self.architecture not in _WINDOWED:
            raise ConfigError(f"architecture '{self.architecture}' has no sliding_window")


def build_tiny_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer with at most `vocab_size` tokens, added tokens included; digits are single tokens.

    `<|endoftext|>` pads and `<|im_end|>` ends a turn; the tags of tool calls, tool responses and reasoning are single
    tokens, which decoding keeps.

    Raises:
        ConfigError: `vocab_size` is too small for all bytes and the added tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = (PAD_TOKEN, TURN_START, TURN_END)
    least = BYTES + len(special) + len(TAGS)
    if vocab_size < least:
        raise ConfigError(f"vocab_size {vocab_size} is too small for a byte-level tokenizer: use {least} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Control tokens are removed before training, so that no merges are spent on them.
    control = re.compile("|".join(map(re.escape, (*special, *TAGS))))
    tokenizer.train_from_iterator((piece for text in texts for piece in control.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    template = resources.files(__package__).joinpath("tiny_chat_template.jinja").read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def build_tiny_model(spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Builds a randomly initialised float32 model in evaluation mode.

    Raises:
        ConfigError: the tokenizer has more tokens than `spec.vocab_size`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if len(tokenizer) > spec.vocab_size:
        raise ConfigError(f"the tokenizer has {len(tokenizer)} tokens, more than vocab_size {spec.vocab_size}")
    head_dim = spec.hidden_size // spec.num_heads
    config = AutoConfig.for_model(
        spec.architecture,
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        initializer_range=spec.initializer_range,
        tie_word_embeddings=spec.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **_particulars(spec, head_dim),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval()


def _particulars(spec: TinyModelSpec, head_dim: int) -> dict[str, Any]:
    """Returns the settings specific to the architecture."""
    keys: dict[str, Any] = {}
    if spec.architecture != "gemma3_text":  # it has a rotary embedding per kind of layer, with defaults
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    if spec.architecture in ("gemma2", "gemma3_text"):
        keys["query_pre_attn_scalar"] = head_dim
    if spec.architecture in _WINDOWED:
        every = spec.max_position_embeddings if spec.architecture.startswith("gemma") else None  # Gemma needs a number
        keys["sliding_window"] = spec.sliding_window or every
    if spec.architecture in _ALTERNATING:
        slides = spec.sliding_window is not None
        kinds = ("full_attention", "sliding_attention")
        keys["layer_types"] = [kinds[slides and i % 2 == 0] for i in range(spec.num_layers)]
    if spec.architecture == "qwen3_moe":
        keys |= {"num_experts": spec.num_experts, "num_experts_per_tok": spec.num_experts_per_tok}
        keys |= {"moe_intermediate_size": spec.intermediate_size, "norm_topk_prob": True}
    if spec.architecture in ("qwen2", "qwen3"):
        keys["use_sliding_window"] = spec.sliding_window is not None
    return keys
