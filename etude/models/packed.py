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
    """Runs of tokens laid one after another, each continuing from others: a tree of prefixes.

    A run sees its ancestors, whole, and itself causally. So a beginning that several sequences share is computed once,
    and its gradient is the sum of theirs. Without ancestors the runs are separate sequences.
    """

    def __init__(self, lengths: Sequence[int], ancestors: Sequence[Sequence[int]] | None = None) -> None:
        """`lengths` sum to the token count and are positive; `ancestors[i]` are the numbers of the runs before run i,
        from the root down, all of them less than i."""
        self.lengths = list(lengths)
        self.ancestors = [tuple(up) for up in ancestors] if ancestors else [()] * len(self.lengths)
        self.depths = [sum(self.lengths[a] for a in up) for up in self.ancestors]
        self._masks: dict[tuple[int, int], Tensor] = {}

    def position_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """(1, total_tokens): positions count from the root of each run's sequence."""
        runs = zip(self.depths, self.lengths)
        return torch.cat([torch.arange(depth, depth + length, device=device) for depth, length in runs])[None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        queries, keys, values = (x.split(self.lengths, dim=1) for x in (query, key, value))
        outputs = []
        for i, up in enumerate(self.ancestors):
            k, v = (torch.cat([x[a] for a in (*up, i)], dim=1)[None] if up else x[i][None] for x in (keys, values))
            mask = self._mask(i, query.device) if up else None
            out = F.scaled_dot_product_attention(
                queries[i][None], k, v, attn_mask=mask, is_causal=not up, scale=scale, enable_gqa=True
            )
            outputs.append(out[0])
        return torch.cat(outputs, dim=1).transpose(0, 1)

    def _mask(self, run: int, device: torch.device) -> Tensor:
        """(length, depth + length) of bool; layers and runs of one shape share it."""
        shape = self.depths[run], self.lengths[run]
        if shape not in self._masks:
            depth, length = shape
            self._masks[shape] = torch.ones(length, depth + length, dtype=torch.bool, device=device).tril(depth)
        return self._masks[shape]


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
