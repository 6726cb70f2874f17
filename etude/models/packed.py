"""Packed forward passes: many sequences in one row of tokens, with no padding anywhere.

A Hugging Face causal LM runs on a single row of shape (1, total_tokens); only attention has to know where sequences
begin and end. `packed_attention` is registered as an attention implementation, and hands queries, keys and values to the
`AttentionLayout` that the caller passed to `model.forward(..., layout=...)`. Training uses `CausalSequences`; the native
inference engine has a layout of its own that reads and writes a key/value cache.

Invariant: a token's output depends only on tokens of its own sequence at positions up to its own.

Models whose attention is more than softmax over all earlier tokens (sliding windows, logit soft-capping, sinks) are
refused by `enable_packing` rather than computed wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from etude.errors import ConfigError

ATTENTION_NAME = "etude_packed"


class AttentionLayout(Protocol):
    """Where the sequences of a packed row lie, and how they attend."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query (heads, tokens, head_dim), key and value (kv_heads, tokens, head_dim) → (tokens, heads, head_dim)."""
        ...


class CausalSequences:
    """Whole sequences laid one after another, each attending causally to itself.

    A sequence may branch: behind its `lengths[i]` tokens lie continuations of `branches[i]` tokens each, which see the
    sequence and themselves but not each other. So what several rows begin with is computed once.
    """

    def __init__(self, lengths: Sequence[int], branches: Sequence[Sequence[int]] | None = None) -> None:
        """`lengths` and `branches` sum to the token count; no branch is empty."""
        self.lengths = list(lengths)
        self.branches = [list(b) for b in branches] if branches else [[] for _ in self.lengths]
        self._pieces = [n for length, tails in zip(self.lengths, self.branches) for n in (length, *tails)]

    def position_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """(1, total_tokens): positions that restart at 0 with each sequence, and in a branch go on from its trunk's."""
        pieces = []
        for length, tails in zip(self.lengths, self.branches):
            pieces.append(torch.arange(length, device=device))
            pieces += [torch.arange(length, length + tail, device=device) for tail in tails]
        return torch.cat(pieces)[None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        pieces = zip(*(x.split(self._pieces, dim=1) for x in (query, key, value)))
        outputs = []
        for length, tails in zip(self.lengths, self.branches):
            trunk = next(pieces)
            if not tails:
                outputs.append(_causal(trunk, scale))
            for number in range(len(tails)):
                # The trunk's queries come along only so that the mask is a plain triangle; one result of them is kept.
                whole = _causal([torch.cat(parts, dim=1) for parts in zip(trunk, next(pieces))], scale)
                outputs.append(whole[:, length:] if number else whole)
        return torch.cat(outputs, dim=1).transpose(0, 1)


def _causal(parts: Sequence[Tensor], scale: float) -> Tensor:
    """Query, key and value of one sequence, shaped as in `AttentionLayout` → (heads, tokens, head_dim)."""
    query, key, value = (part[None] for part in parts)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)[0]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    layout: AttentionLayout,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls: (1, heads, tokens, head_dim) → (1, tokens, heads, head_dim)."""
    if dropout:
        raise ConfigError("attention dropout is not supported: set attention_dropout to 0 in the model's config.json")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    return layout.attend(int(module.layer_idx), query[0], key[0], value[0], scale)[None], None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION_NAME, packed_attention)


def enable_packing(model: Any) -> None:
    """Switches a Hugging Face causal LM to packed attention.

    Raises:
        ConfigError: the architecture does not use plain causal attention through the attention interface.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    reason = None
    if not getattr(model, "_supports_attention_backend", False):
        reason = "its attention cannot be replaced"
    elif kinds != {"full_attention"} or (
        getattr(config, "sliding_window", None) and not hasattr(config, "layer_types")
    ):
        reason = f"it uses {', '.join(sorted(kinds - {'full_attention'})) or 'sliding-window attention'}"
    elif getattr(config, "attn_logit_softcapping", None):
        reason = "it caps attention logits"
    elif any("sinks" in name.rsplit(".", 1)[-1] for name, _ in model.named_parameters()):
        reason = "it uses attention sinks"
    if reason:
        raise ConfigError(f"model type '{config.model_type}' is not supported by the native engine: {reason}")
    model.set_attn_implementation(ATTENTION_NAME)


def packed_hidden(model: Any, token_ids: Tensor, position_ids: Tensor, layout: AttentionLayout) -> Tensor:
    """Final hidden states (tokens, hidden) of packed `token_ids` (tokens,) at `position_ids` (1, tokens)."""
    output = model.base_model(input_ids=token_ids[None], position_ids=position_ids, use_cache=False, layout=layout)
    return output.last_hidden_state[0]
