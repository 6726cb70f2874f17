"""Softmax attention over a part of a context, with the log-sum-exp that merges parts.

Invariant: `merge_attention(partial over A, partial over B)` is the attention over A and B together. The caller decides
visibility, with a mask.

Splitting a context pays off because trajectories of one group share their prompt: its keys are then read once for all of
them. The merge rule is that of flash attention (Dao et al. 2022, arXiv 2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """How a layer scores keys: `scale` · query · key, then `softcap` · tanh(score / softcap) if set. A query at position p
    attends to earlier keys above p - `window`, and in its own `chunk` of positions; None: no such limit. `sinks` (heads,):
    scores of one more key for each head, whose value is 0."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None
    sinks: Tensor | None = field(default=None, compare=False)

    @property
    def span(self) -> tuple[int | None, int | None]:
        """(window, chunk): layers of one span share their masks."""
        return self.window, self.chunk

    def within(self, length: int) -> Scoring:
        """Returns the same scoring without the limits that no context of `length` tokens reaches."""
        window = None if self.window is not None and self.window >= length else self.window
        chunk = None if self.chunk is not None and self.chunk >= length else self.chunk
        return self if (window, chunk) == self.span else replace(self, window=window, chunk=chunk)

    def first(self, positions: Tensor) -> Tensor:
        """Returns the first position that a query at each of `positions` attends to."""
        first = torch.zeros_like(positions)
        if self.window is not None:
            first = torch.maximum(first, positions - self.window + 1)
        return first if self.chunk is None else torch.maximum(first, positions - positions % self.chunk)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns which of the positions `keys` (keys,) the positions `queries` (queries,) attend to: (queries, keys) of
        bool."""
        return (keys <= queries[:, None]) & (keys >= self.first(queries)[:, None])


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
    if scoring.softcap is None and not torch.is_grad_enabled():
        if query.device.type == "cpu":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, False, attn_mask=bias, scale=scoring.scale
            )
        if _takes_efficient(query, value, scoring):
            wide = None if bias is None else bias.expand(*query.shape[:3], key.shape[2])
            out, normaliser, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, wide, True, 0.0, False, scale=scoring.scale
            )
            return out, normaliser[:, :, : query.shape[2]]
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if bias is not None:
        scores = scores + bias
    normaliser = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - normaliser[..., None])
    return weights.to(value.dtype) @ value, normaliser


def _takes_efficient(query: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Whether CUDA's memory-efficient attention computes this, in one kernel instead of eight. With a window or chunk a
    query may see nothing of its part, for which that kernel gives NaN."""
    widths = {query.shape[-1], value.shape[-1]}
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return query.is_cuda and scoring.span == (None, None) and query.dtype in dtypes and not any(w % 8 for w in widths)


def with_sinks(part: tuple[Tensor, Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Adds the sinks' share, which goes nowhere, to the normaliser of `partial_attention`: that of one part, if the context
    has several. `sinks` broadcasts to the normaliser; None: none."""
    if sinks is None:
        return part
    out, normaliser = part
    sinks = sinks.to(normaliser.dtype)
    share = torch.sigmoid(normaliser - sinks)
    return out * share[..., None].to(out.dtype), torch.logaddexp(normaliser, sinks)


def visibility(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bias to add to scores: 0 where `mask` is True, the lowest finite number elsewhere. On a GPU its rows begin
    at multiples of 8 numbers, as memory-efficient attention wants them."""
    keys = mask.shape[-1]
    room = keys + -keys % 8 if mask.is_cuda else keys
    rows = torch.zeros(*mask.shape[:-1], room, dtype=dtype, device=mask.device)
    return rows[..., :keys].masked_fill_(~mask, torch.finfo(dtype).min)


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
