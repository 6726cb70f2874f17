"""The tiny-model factory: a tokenizer and a Qwen3-format model small enough to train on a CPU in minutes.

Invariant: everything is a function of its arguments. The same texts and vocabulary size give the same tokenizer, the
same spec and tokenizer give the same weights, whatever ran before; the caller's random state is left as it was.

The chat template (`tiny_chat_template.jinja`) writes Qwen's turns with a compact list of tools, because a model of less
than a million parameters has to read it. The texts the tokenizer learns from are the caller's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from etude.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3ForCausalLM

PAD_TOKEN = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
BYTES = 256


@dataclass(frozen=True)
class TinyModelSpec:
    """Sizes and seed of a tiny model; `vocab_size` is the most tokens its tokenizer may have.

    The model's embedding has exactly as many rows as the tokenizer has tokens, so that no id without a text is sampled.
    """

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 384
    vocab_size: int = 512
    max_position_embeddings: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ConfigError(
                f"hidden_size {self.hidden_size} over num_heads {self.num_heads} must be an even whole head size"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")


def build_tiny_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, added tokens included; digits stay single.

    `<|endoftext|>` pads and `<|im_end|>` ends a turn; the tags of tool calls, tool responses and thoughts are single
    tokens that decoding keeps.

    Raises:
        ConfigError: `vocab_size` has no room for all bytes and the added tokens.
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
    # Control tokens are cut out before training so that no merge is spent on their letters.
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


def build_tiny_model(spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """A randomly initialised float32 Qwen3 with tied embeddings, in evaluation mode.

    Raises:
        ConfigError: the tokenizer has more tokens than `spec.vocab_size`.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if len(tokenizer) > spec.vocab_size:
        raise ConfigError(f"the tokenizer has {len(tokenizer)} tokens, more than vocab_size {spec.vocab_size}")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.hidden_size // spec.num_heads,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval()
