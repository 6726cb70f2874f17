"""Attention of one engine step: which keys each token of the step sees, and where its own are written.

A step is a list of `Feed`s. A token sees the shared prefix of its trajectory (all of it, or its first tokens) and its own
slot up to itself. The two parts are computed apart and joined by their normalisers: the tokens of all trajectories that
share a prefix are queries of one product, so that a prompt's keys are read once for its whole group.

This is for rows that feed one token, which attend together, slab by slab. Rows that feed more (a prompt's chunk, a tool's
answer) attend one by one over both parts laid together. Neither pads a row beyond the slots of its own size.

Invariant: after a step, places [0, start + count) of each fed slot hold the keys and values of exactly the tokens that were
fed into it. Whatever lies behind is finite and masked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from etude.inference.cache import Slab, Slot
from etude.models.attention import Scoring, joined, partial_attention, visibility

_TILE = 512  # queries of one row that attend at once
_BIAS_ELEMENTS = 1 << 22  # fewer, where their mask would be larger than this

T = TypeVar("T")


@dataclass(frozen=True)
class Feed:
    """A row's part of a step: `ids` for `slot`, behind the `start` tokens it holds; its place 0 is position `base`.

    Before that come the first `base` tokens of the slot `prefix`; without a prefix `base` is 0.
    """

    ids: Sequence[int]
    slot: Slot
    start: int
    base: int = 0
    prefix: Slot | None = None


class StepLayout:
    """See `etude.models.packed.AttentionLayout`."""

    def __init__(self, feeds: Sequence[Feed], device: torch.device) -> None:
        self._device, self.dtype = device, feeds[0].slot.slab.keys[0].dtype
        offsets, total = [], 0
        for feed in feeds:
            offsets.append(total)
            total += len(feed.ids)
        self.tokens = total
        self.last = [offset + len(feed.ids) - 1 for offset, feed in zip(offsets, feeds)]
        places = [feed.start + i for feed in feeds for i in range(len(feed.ids))]
        bases = [feed.base for feed in feeds for _ in feed.ids]
        self.ids = self._index([token for feed in feeds for token in feed.ids])
        positions = [base + place for base, place in zip(bases, places)]
        self.positions, self._furthest = self._index(positions), max(positions)
        numbered = list(zip(offsets, feeds))
        fed = _by_slab((f.slot, range(o, o + len(f.ids))) for o, f in numbered)
        self._writes = [
            (
                slab,
                None if len(fed) == 1 else self._index([t for _, tokens in parts for t in tokens]),
                self._index([slot.index for slot, tokens in parts for _ in tokens]),
                self._index([places[t] for _, tokens in parts for t in tokens]),
            )
            for slab, parts in fed.items()
        ]
        single = _by_slab((f.slot, (o, f)) for o, f in numbered if len(f.ids) == 1)
        self._decodes = [_Decode(self, slab, parts) for slab, parts in single.items()]
        self._spans = [(o, f) for o, f in numbered if len(f.ids) > 1]
        self._span_biases: dict[tuple[int, int, int | None], Tensor] = {}
        seen: dict[Slot, list[int]] = defaultdict(list)
        for offset, feed in numbered:
            if feed.prefix is not None and len(feed.ids) == 1:
                seen[feed.prefix].append(offset)
        self._bases = bases
        prefixes = _by_slab(seen.items())
        self._shared = [_Shared(self, slab, parts) for slab, parts in prefixes.items()]
        prefixed = [t for parts in prefixes.values() for _, tokens in parts for t in tokens]
        self._prefixed = None if prefixed == list(range(total)) else self._index(prefixed)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See `AttentionLayout.attend`; also writes the step's keys and values into their slots."""
        heads, tokens, dim = query.shape
        kv_heads = key.shape[0]
        if scoring.window is not None and scoring.window > self._furthest:
            scoring = Scoring(scoring.scale, None, scoring.softcap)
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        for slab, chosen, slots, places in self._writes:
            slab.keys[layer][slots, :, places] = key if chosen is None else key[chosen]
            slab.values[layer][slots, :, places] = value if chosen is None else value[chosen]
        grouped = query.transpose(0, 1).reshape(tokens, kv_heads, heads // kv_heads, dim)
        own = self._own(layer, grouped, scoring)
        if self._shared:
            own = self._join(layer, grouped, own, scoring)
        return own[0].reshape(tokens, heads, dim)

    def _own(self, layer: int, query: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Of single tokens over their own slots, of others over all they see: (tokens, kv_heads, group, head_dim) and
        the single tokens' normalisers without the last axis."""
        if len(self._decodes) == 1 and not self._spans:
            return self._decodes[0].attend(layer, query, scoring)
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        for decode in self._decodes:
            out[decode.tokens], lse[decode.tokens] = decode.attend(layer, query[decode.tokens], scoring)
        for offset, feed in self._spans:
            rows = slice(offset, offset + len(feed.ids))
            out[rows] = self._span(layer, query[rows], feed, scoring)
        return out, lse

    def _span(self, layer: int, query: Tensor, feed: Feed, scoring: Scoring) -> Tensor:
        """Tokens of one row over its prefix and slot: (count, kv_heads, group, head_dim) in and out."""
        count, kv_heads, group, dim = query.shape
        start = feed.base + feed.start
        first = 0 if scoring.window is None else max(start - scoring.window + 1, 0)
        keys, values = (self._laid(layer, feed, first, which) for which in ("keys", "values"))
        tile = max(min(_TILE, _BIAS_ELEMENTS // (group * (start + count - first))), 1)
        outputs = []
        for begin in range(0, count, tile):
            rows = query[begin : begin + tile]
            length = len(rows)
            end = start + begin + length - first
            bias = self._span_bias(start + begin - first, length, scoring.window, group)
            heads = rows.transpose(0, 1).reshape(1, kv_heads, length * group, dim)
            out, _ = partial_attention(heads, keys[:, :, :end], values[:, :, :end], bias, scoring)
            outputs.append(out.reshape(kv_heads, length, group, dim).transpose(0, 1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _laid(self, layer: int, feed: Feed, first: int, which: str) -> Tensor:
        """Keys or values from position `first` to the last that the feed wrote: (1, kv_heads, positions, head_dim)."""
        begin, end = max(first - feed.base, 0), feed.start + len(feed.ids)
        own = getattr(feed.slot.slab, which)[layer][feed.slot.index : feed.slot.index + 1, :, begin:end]
        if feed.prefix is None or first >= feed.base:
            return own
        slot = feed.prefix
        return torch.cat([getattr(slot.slab, which)[layer][slot.index, None, :, first : feed.base], own], dim=2)

    def _span_bias(self, start: int, count: int, window: int | None, group: int) -> Tensor:
        """(1, 1, count · group, start + count): queries from `start` on, of `group` heads each."""
        name = start, count, window
        if name not in self._span_biases:
            mask = torch.ones(count, start + count, dtype=torch.bool, device=self._device).tril_(start)
            if window is not None:
                mask.triu_(start - window + 1)
            self._span_biases[name] = visibility(mask.repeat_interleave(group, dim=0)[None, None], self.dtype)
        return self._span_biases[name]

    def _join(self, layer: int, query: Tensor, own: tuple[Tensor, Tensor], scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Own parts joined with those over the prefixes, for the single tokens that have one."""
        parts = [shared.attend(layer, query, scoring) for shared in self._shared]
        first = parts[0] if len(parts) == 1 else (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
        blind = None
        if scoring.window is not None:
            blind = torch.cat([shared.blind(scoring.window) for shared in self._shared])[:, None, None]
        if self._prefixed is None:
            return joined(first, own, blind), own[1]
        chosen = self._prefixed
        own[0][chosen] = joined(first, (own[0][chosen], own[1][chosen]), blind)
        return own


def _by_slab(items: Iterable[tuple[Slot, T]]) -> dict[Slab, list[tuple[Slot, T]]]:
    grouped: dict[Slab, list[tuple[Slot, T]]] = defaultdict(list)
    for slot, item in items:
        grouped[slot.slab].append((slot, item))
    return grouped


class _Slice:
    """Slots of one slab, seen in place where most of its slots are wanted, gathered where few are."""

    def __init__(self, slab: Slab, slots: Sequence[int], reach: int, device: torch.device) -> None:
        self.slab, self.reach = slab, reach
        top = max(slots) + 1
        self.rows = top if 2 * len(slots) > top else None
        self.places = list(slots) if self.rows is not None else list(range(len(slots)))
        self.height = top if self.rows is not None else len(slots)
        self._index = torch.tensor(slots, dtype=torch.long, device=device)

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Each (height, kv_heads, reach, head_dim)."""
        chosen = slice(0, self.rows) if self.rows is not None else self._index
        keys, values = self.slab.keys[layer], self.slab.values[layer]
        if self.rows is None:  # narrow first: indexing copies
            return keys[:, :, : self.reach][chosen], values[:, :, : self.reach][chosen]
        return keys[chosen, :, : self.reach], values[chosen, :, : self.reach]


class _Decode:
    """Rows of one slab that feed one token each."""

    def __init__(self, layout: StepLayout, slab: Slab, parts: list[tuple[Slot, tuple[int, Feed]]]) -> None:
        device = layout._device
        starts = [feed.start for _, (_, feed) in parts]
        self.tokens = layout._index([offset for _, (offset, _) in parts])
        self._slice = _Slice(slab, [slot.index for slot, _ in parts], max(starts) + 1, device)
        ends = [0] * self._slice.height  # idle slots attend to their place 0, and nobody reads the result
        for place, start in zip(self._slice.places, starts):
            ends[place] = start
        self._spread = self._slice.places != list(range(self._slice.height))
        self._places = layout._index(self._slice.places)
        self._ends = layout._index(ends)[:, None]
        self._even = len(set(starts)) == 1 and not self._spread
        self._dtype = layout.dtype
        self._biases: dict[int | None, Tensor | None] = {}

    def _bias(self, window: int | None) -> Tensor | None:
        """(height, 1, 1, reach)."""
        if window not in self._biases:
            places = torch.arange(self._slice.reach, device=self._ends.device)
            mask = places <= self._ends
            if window is not None:
                mask &= places > self._ends - window
            plain = self._even and window is None
            self._biases[window] = None if plain else visibility(mask[:, None, None], self._dtype)
        return self._biases[window]

    def attend(self, layer: int, query: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Queries (rows, kv_heads, group, head_dim), in the order of `tokens`."""
        keys, values = self._slice.keys_and_values(layer)
        if self._spread:
            spread = query.new_zeros(self._slice.height, *query.shape[1:])
            spread[self._places] = query
            query = spread
        out, lse = partial_attention(query, keys, values, self._bias(scoring.window), scoring)
        return (out[self._places], lse[self._places]) if self._spread else (out, lse)


class _Shared:
    """Prefixes of one slab, each with the tokens that see it."""

    def __init__(self, layout: StepLayout, slab: Slab, parts: list[tuple[Slot, list[int]]]) -> None:
        bases, device = layout._bases, layout._device
        reach = max(bases[token] for _, tokens in parts for token in tokens)
        self._slice = _Slice(slab, [slot.index for slot, _ in parts], reach, device)
        self._width = max(len(tokens) for _, tokens in parts)
        table = [[0] * self._width for _ in range(self._slice.height)]
        order = []
        for place, (_, tokens) in zip(self._slice.places, parts):
            table[place] = tokens + tokens[:1] * (self._width - len(tokens))
            order += [place * self._width + i for i in range(len(tokens))]
        self._table = layout._index([token for row in table for token in row])
        self._order = layout._index(order)
        limits = [[bases[token] for token in row] for row in table]
        self._plain = all(set(row) == {reach} for row in limits)
        self._even = all(len(set(row)) == 1 for row in limits)
        self._limits = layout._index([limit for row in limits for limit in row])[:, None]
        self._ends = layout.positions[self._table][:, None]
        self._dtype = layout.dtype
        self._biases: dict[int | None, Tensor | None] = {}

    def _bias(self, window: int | None, group: int) -> Tensor | None:
        """(height, 1, 1 or width · group, reach)."""
        if window not in self._biases:
            places = torch.arange(self._slice.reach, device=self._ends.device)
            mask = places < self._limits
            if window is not None:
                mask &= places > self._ends - window
            mask = mask.view(self._slice.height, 1, self._width, -1)
            if window is None and self._even:  # one row of mask for all queries of a prefix
                mask = mask[:, :, :1]
            else:
                mask = mask.repeat_interleave(group, dim=2)
            self._biases[window] = None if self._plain and window is None else visibility(mask, self._dtype)
        return self._biases[window]

    def blind(self, window: int) -> Tensor:
        """Which of the tokens see nothing of their prefix any more: (tokens,) of bool."""
        return (self._ends - window >= self._limits - 1).flatten()[self._order]

    def attend(self, layer: int, query: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Of all the step's queries (tokens, kv_heads, group, head_dim) those that see these prefixes, in their order."""
        kv_heads, group, dim = query.shape[1:]
        height, width = self._slice.height, self._width
        bias = self._bias(scoring.window, group)
        rows = query[self._table].view(height, width, kv_heads, group, dim).transpose(1, 2)
        keys, values = self._slice.keys_and_values(layer)
        out, lse = partial_attention(rows.reshape(height, kv_heads, width * group, dim), keys, values, bias, scoring)
        out = out.reshape(height, kv_heads, width, group, dim).transpose(1, 2).reshape(-1, kv_heads, group, dim)
        lse = lse.reshape(height, kv_heads, width, group).transpose(1, 2).reshape(-1, kv_heads, group)
        return out[self._order], lse[self._order]
