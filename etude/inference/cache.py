"""Key/value slots, and the attention layout of one engine step.

A slot holds the keys and values of one trajectory's context, from position 0. Slots are numbered; the lowest free one is
given out first, so that the slots in use stay dense and a decode step can attend over a slice of the cache instead of
gathering rows. Storage grows with need, in slots and in length.

Invariant: after a step, positions [0, start + count) of each row's slot hold the keys and values of exactly the tokens
the row has fed. Whatever lies behind is finite and masked.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LENGTH_STEP = 128  # positions by which storage grows: few reallocations, little waste


class SlotCache:
    """Keys and values per layer, each of shape (slots, kv_heads, capacity, head_dim)."""

    def __init__(self, num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (kv_heads, head_dim)
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.keys = [torch.zeros(0, kv_heads, 0, head_dim, **self._options) for _ in range(num_layers)]
        self.values = [torch.zeros(0, kv_heads, 0, head_dim, **self._options) for _ in range(num_layers)]
        self._free: list[int] = []
        self._top = 0  # slots ever given out

    def take(self) -> int:
        """The lowest free slot."""
        if self._free:
            return heapq.heappop(self._free)
        self._top += 1
        return self._top - 1

    def give_back(self, slot: int) -> None:
        """Frees a slot; the highest ones shrink the range in use."""
        heapq.heappush(self._free, slot)
        while self._top and (self._top - 1) in self._free:
            self._free.remove(self._top - 1)
            self._top -= 1
        heapq.heapify(self._free)

    @property
    def in_use(self) -> int:
        """Slots given out and not given back."""
        return self._top - len(self._free)

    @property
    def top(self) -> int:
        """One more than the highest slot in use."""
        return self._top

    def reserve(self, length: int) -> None:
        """Makes room for `length` positions in every slot that was given out."""
        slots, capacity = self.keys[0].shape[0], self.keys[0].shape[2]
        if self._top <= slots and length <= capacity:
            return
        slots = max(slots, self._top if not slots else max(self._top, min(2 * slots, self._top + 64)))
        capacity = max(capacity, -(-length // _LENGTH_STEP) * _LENGTH_STEP)
        kv_heads, head_dim = self._shape
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                new = torch.zeros(slots, kv_heads, capacity, head_dim, **self._options)
                new[: old.shape[0], :, : old.shape[2]] = old
                store[layer] = new

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of one slot to another."""
        for store in (self.keys, self.values):
            for layer in store:
                layer[target, :, :length] = layer[source, :, :length]


@dataclass(frozen=True)
class RowFeed:
    """One row's part of a step: `count` tokens for `slot`, behind the `start` positions it holds already."""

    slot: int
    start: int
    count: int


class StepLayout:
    """Attention of one step: rows that feed one token are computed together, the others one by one."""

    def __init__(self, cache: SlotCache, feeds: list[RowFeed], device: torch.device) -> None:
        self._cache, self._feeds = cache, feeds
        self._slots = torch.tensor([f.slot for f in feeds for _ in range(f.count)], device=device)
        self.positions = torch.tensor([f.start + i for f in feeds for i in range(f.count)], device=device)
        offsets, total = [], 0
        for feed in feeds:
            offsets.append(total)
            total += feed.count
        self.last = torch.tensor([o + f.count - 1 for o, f in zip(offsets, feeds)], device=device)
        self._long = [(o, f) for o, f in zip(offsets, feeds) if f.count > 1 or f.start == 0]
        self._masks = {
            o: torch.ones(f.count, f.start + f.count, dtype=torch.bool, device=device).tril(f.start)
            for o, f in self._long
            if f.start
        }
        single = [(o, f) for o, f in zip(offsets, feeds) if f.count == 1 and f.start > 0]
        self._single = torch.tensor([o for o, _ in single], device=device)
        if single:
            self._plan_decode([f for _, f in single], device)

    def _plan_decode(self, single: list[RowFeed], device: torch.device) -> None:
        """Chooses between attending over all slots in place (no copy) and gathering the few that are live."""
        slots = torch.tensor([f.slot for f in single], device=device)
        starts = torch.tensor([f.start for f in single], device=device)
        self._reach = max(f.start for f in single) + 1
        self._top = self._cache.top
        self._in_place = 2 * len(single) > self._top
        self._rows = slots
        if self._in_place:
            ends = torch.zeros(self._top, dtype=torch.long, device=device)
            ends[slots] = starts  # idle slots attend to their position 0, and nobody reads the result
            starts = ends
        self._mask = (torch.arange(self._reach, device=device) <= starts[:, None])[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `AttentionLayout.attend`; also writes the step's keys and values into the cache."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._slots, :, self.positions] = key.transpose(0, 1)
        values[self._slots, :, self.positions] = value.transpose(0, 1)
        heads, tokens, dim = query.shape
        output = query.new_empty(tokens, heads, dim)
        if len(self._single):
            output[self._single] = self._decode(query[:, self._single].transpose(0, 1), keys, values, scale)
        for offset, feed in self._long:
            end = feed.start + feed.count
            mask = self._masks.get(offset)
            output[offset : offset + feed.count] = F.scaled_dot_product_attention(
                query[None, :, offset : offset + feed.count],
                keys[feed.slot : feed.slot + 1, :, :end],
                values[feed.slot : feed.slot + 1, :, :end],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return output

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """(rows, heads, dim) queries of one token each; the heads of a group share their keys without a copy."""
        rows, heads, dim = query.shape
        kv_heads, reach = keys.shape[1], self._reach
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim)
        if self._in_place:
            top = self._top
            spread = grouped.new_zeros(top, *grouped.shape[1:])
            spread[self._rows] = grouped
            grouped, keys, values = spread, keys[:top, :, :reach], values[:top, :, :reach]
        else:
            keys, values = keys[self._rows, :, :reach], values[self._rows, :, :reach]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scale)
        if self._in_place:
            out = out[self._rows]
        return out.reshape(rows, heads, dim)
