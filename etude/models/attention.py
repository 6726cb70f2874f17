"""Softmax attention over a part of a context, with the log-sum-exp that merges parts.

Invariant: `merge_attention(partial over A, partial over B)` is the attention over A and B together. The caller decides
visibility, with a mask.

Splitting a context pays off because trajectories of one group share their prompt: its keys are then read once for all of
them. The merge rule is that of flash attention (Dao et al. 2022, arXiv 2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """How a layer scores keys: `scale` · query · key, then `softcap` · tanh(score / softcap) if set. A query at position p
    attends to keys at positions above p - `window`; without a window, to all earlier ones."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Computes attention and its normaliser; `bias` must include the scoring's window.

    Args:
        query: (batch, heads, queries, head_dim); key, value: (batch, heads, keys, head_dim).
        bias: of the query's dtype, broadcasts to (batch, heads, queries, keys), see `visibility`. None: all is visible.

    Returns:
        (batch, heads, queries, head_dim), and the log-sum-exp of the scores, (batch, heads, queries), at least float32. For
        a query that sees nothing, the normaliser is undefined: see `merge_attention`.
    """
    if query.device.type == "cpu" and scoring.softcap is None and not torch.is_grad_enabled():
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=bias, scale=scoring.scale
        )
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if bias is not None:
        scores = scores + bias
    normaliser = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - normaliser[..., None])
    return weights.to(value.dtype) @ value, normaliser


def visibility(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bias to add to scores: 0 where `mask` is True, the lowest finite number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def merge_attention(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], first_blind: Tensor | None = None
) -> Tensor:
    """Merges the attention over two parts of a context.

    Args:
        first, second: outputs (..., head_dim) and normalisers (...) of `partial_attention`.
        first_blind: bool, broadcasts to the normalisers: whether the query sees nothing of the first part. It must see
            something of the second.
    """
    share = torch.sigmoid(second[1] - first[1])
    if first_blind is not None:
        share = share.masked_fill(first_blind, 1.0)
    return torch.lerp(first[0], second[0], share[..., None].to(first[0].dtype))
