"""Packed forward passes: many sequences in one row of tokens, without padding.

A Hugging Face causal LM runs on a single row of shape (1, total_tokens); only attention needs to know where sequences start
and end. `packed_attention` is registered as an attention implementation and passes queries, keys and values to the
`AttentionLayout` given to `model.forward(..., layout=...)`. Training uses `CausalSequences`; the native inference engine has
its own layout, which reads and writes a key/value cache.

Invariant: a token's output depends only on tokens of its own sequence at positions up to its own.

Sliding windows and soft-capped scores are supported. A model with another kind of attention, or whose tokens interact in
another way, is rejected by `enable_packing` (see `etude.models.packable`) instead of being computed wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from etude.errors import ConfigError
from etude.models.attention import Scoring, partial_attention, visibility
from etude.models.vision import PlacedFeatures, Vision, hidden_with_images

ATTENTION_NAME = "etude_packed"
_MASKED_LOGIT = -1e30  # finite, so that 0 · logit is 0, at any temperature
_UNKNOWN_ARGUMENTS = ("s_aux", "sinks", "position_bias", "indices", "block_indices")


class AttentionLayout(Protocol):
    """Where the sequences of a packed row are, and how their tokens attend."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query (heads, tokens, head_dim), key and value (kv_heads, tokens, head_dim) → (tokens, heads, head_dim)."""
        ...


class CausalSequences:
    """Concatenated runs of tokens that form a prefix tree.

    A run attends to all of its ancestors, and causally to itself. So a prefix shared by several sequences is computed once,
    and its gradient is the sum of theirs. Without ancestors, the runs are separate sequences.
    """

    def __init__(self, lengths: Sequence[int], ancestors: Sequence[Sequence[int]] | None = None) -> None:
        """`lengths` are positive and sum to the token count; `ancestors[i]`: indices of the ancestor runs of run i, from the
        root down, all less than i."""
        self.lengths = list(lengths)
        self.ancestors = [tuple(up) for up in ancestors] if ancestors else [()] * len(self.lengths)
        self.depths = [sum(self.lengths[a] for a in up) for up in self.ancestors]
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def position_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """Returns position ids (1, total_tokens), counted from the root of each run's sequence."""
        runs = zip(self.depths, self.lengths)
        return torch.cat([torch.arange(depth, depth + length, device=device) for depth, length in runs])[None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        queries, keys, values = (x.split(self.lengths, dim=1) for x in (query, key, value))
        outputs = []
        for i, up in enumerate(self.ancestors):
            k, v = (torch.cat([x[a] for a in (*up, i)], dim=1)[None] if up else x[i][None] for x in (keys, values))
            window = scoring.window if scoring.window is not None and scoring.window < k.shape[2] else None
            plain = not up and window is None
            if scoring.softcap is not None:
                out = masked_attention(queries[i][None], k, v, self._mask(i, window, query.device), scoring)
            else:
                mask = None if plain else self._mask(i, window, query.device)
                out = F.scaled_dot_product_attention(
                    queries[i][None], k, v, attn_mask=mask, is_causal=plain, scale=scoring.scale, enable_gqa=True
                )
            outputs.append(out[0])
        return torch.cat(outputs, dim=1).transpose(0, 1)

    def _mask(self, run: int, window: int | None, device: torch.device) -> Tensor:
        """(length, depth + length) bool mask, cached for layers and runs of the same shape."""
        depth, length = self.depths[run], self.lengths[run]
        shape = depth, length, window
        if shape not in self._masks:
            mask = torch.ones(length, depth + length, dtype=torch.bool, device=device).tril_(depth)
            if window is not None:
                mask.triu_(depth - window + 1)
            self._masks[shape] = mask
        return self._masks[shape]


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Grouped-query attention with a `mask` (tokens, keys) that includes the scoring's window; applies the scoring's soft
    cap. Queries, keys, values and the result are (1, heads, tokens, head_dim)."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return partial_attention(query, key, value, visibility(mask, query.dtype), scoring)[0]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    layout: AttentionLayout,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function called by Transformers: (1, heads, tokens, head_dim) → (1, tokens, heads, head_dim)."""
    if dropout:
        raise ConfigError("attention dropout is not supported: set attention_dropout to 0 in the model's config.json")
    for name in _UNKNOWN_ARGUMENTS:
        if others.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} attends with '{name}', which the packed attention cannot")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    scoring = Scoring(scale, sliding_window, softcap)
    return layout.attend(int(module.layer_idx), query[0], key[0], value[0], scoring)[None], None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION_NAME, packed_attention)


def packed_hidden(
    model: Any, token_ids: Tensor, position_ids: Tensor, layout: AttentionLayout, shown: PlacedFeatures | None = None
) -> Tensor:
    """Computes final hidden states (tokens, hidden) of packed `token_ids` (tokens,) at `position_ids` (1, tokens), or with
    images (3, 1, tokens); `shown`: the images among the tokens."""
    if shown is not None:
        return hidden_with_images(model, token_ids, position_ids, layout, shown)
    output = model.base_model(input_ids=token_ids[None], position_ids=position_ids, use_cache=False, layout=layout)
    return output.last_hidden_state[0]


def logit_finish(model: Any) -> Callable[[Tensor], Tensor] | None:
    """Returns the post-processing of the model's raw logits; None if there is none.

    Gemma 2 caps logits, Cohere multiplies and Granite divides them. A vision model's image placeholder ids are masked out
    (see `etude.models.vision`).
    """
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    vision = Vision.of(model.config)
    if cap is None and factor == 1.0 and vision is None:
        return None

    def finish(logits: Tensor) -> Tensor:
        if vision is not None:
            left_out = torch.tensor([vision.image_token_id, vision.video_token_id], device=logits.device)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).index_fill(-1, left_out, _MASKED_LOGIT)
        if factor != 1.0:
            logits = logits * factor
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return finish


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Computes logits (tokens, vocabulary) from final hidden states (tokens, hidden)."""
    logits, finish = model.get_output_embeddings()(hidden), logit_finish(model)
    return logits if finish is None else finish(logits)
