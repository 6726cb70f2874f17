"""Attention of one engine step: which keys each token attends to, and where the step's keys and values are written.

A step is a list of `StepInput`s. A token attends to the shared prefix of its trajectory (all of it, or its first tokens)
and to its own slot up to itself.

Rows that feed one token (decode) attend to the two parts separately, and the outputs are merged by their log-sum-exp, as
in cascade attention: the tokens of all trajectories that share a prefix are queries of one matrix product, so a prompt's
keys are read once for its whole group. Rows with slots in one slab attend together, over the slab itself if their slots
are adjacent, else over a copy. Rows that feed more tokens (a prefill chunk, a tool result) attend one by one, over both
parts concatenated. Neither pads a row beyond its slot's size.

Invariant: after a step, places [0, start + count) of each fed slot hold the keys and values of exactly the tokens that were
fed into it. Anything after that is finite and masked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from etude.inference.kv_cache import Slab, Slot
from etude.models.attention import Scoring, merge_attention, partial_attention, visibility, with_sinks
from etude.models.image_positions import ImagePositions

T = TypeVar("T")
_TILE = 512  # queries of one row that attend at once; fewer if their mask would have more than _BIAS_ELEMENTS
_BIAS_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class StepInput:
    """A row's tokens in a step: `ids` are appended to the `start` tokens in `slot`, whose place 0 is position `base`.

    Positions below `base` are the first `base` tokens of the slot `prefix`; without a prefix `base` is 0. `images`: those
    of the whole context, whose placeholders in `ids` are keyed.
    """

    ids: Sequence[int]
    slot: Slot
    start: int
    base: int = 0
    prefix: Slot | None = None
    images: ImagePositions | None = None


class StepLayout:
    """Implements `etude.models.packed.AttentionLayout` over the KV cache.

    Tokens are in the order of the attribute `feeds`: rows that feed one token first, slab by slab and slot by slot, so that
    tokens that attend together are adjacent. `last[i]` is the index of the last token of the i-th feed given to `__init__`.
    """

    def __init__(self, feeds: Sequence[StepInput], device: torch.device) -> None:
        self._device, self.dtype = device, feeds[0].slot.slab.keys[0].dtype
        single = by_slab((f.slot, i) for i, f in enumerate(feeds) if len(f.ids) == 1)
        several = by_slab((f.slot, i) for i, f in enumerate(feeds) if len(f.ids) > 1)
        order = [i for batch in (*single, *several) for _, i in batch]
        self.feeds = [feeds[i] for i in order]
        self._singles = sum(map(len, single))
        self.last, self._spans, total = [0] * len(feeds), [], 0
        for i, feed in zip(order, self.feeds):
            if len(feed.ids) > 1:
                self._spans.append((total, feed))
            total += len(feed.ids)
            self.last[i] = total - 1
        self.tokens = total
        self.ids = index_tensor([token for feed in self.feeds for token in feed.ids], device)
        places = [feed.start + i for feed in self.feeds for i in range(len(feed.ids))]
        bases = [feed.base for feed in self.feeds for _ in feed.ids]
        positions = [base + place for base, place in zip(bases, places)]
        self.positions, self._furthest = index_tensor(positions, device), max(positions)
        self._writes = self._written(places)
        self._span_biases: dict[tuple[Any, ...], Tensor] = {}
        self._own, offset = [], 0
        for batch in single:
            rows = slice(offset, offset := offset + len(batch))
            parts = [(slot, (row,)) for row, (slot, _) in enumerate(batch)]
            limits = [place + 1 for place in places[rows]]
            own = AttendedSlots(parts, limits, positions[rows], bases[rows], device)
            self._own.append((rows, own))
        self._share(bases[: self._singles], positions)

    def keep_experts(self, chosen: Sequence[Tensor]) -> None:
        """Writes the experts of the step's tokens, per layer (tokens, k), into the cache."""
        experts, offset = torch.stack(list(chosen), dim=1).to("cpu", torch.int16).numpy(), 0
        for feed in self.feeds:
            count, slab = len(feed.ids), feed.slot.slab
            assert slab.experts is not None
            slab.experts[feed.slot.index, feed.start : feed.start + count] = experts[offset : offset + count]
            offset += count

    def _written(self, places: list[int]) -> list[tuple[Slab, slice, dict[int, Tensor]]]:
        """Returns, per slab, the slice of the step's tokens and, by the number of a layer's kv_heads, the rows to write
        their keys to, in the slab viewed as (slots · kv_heads · capacity, head_dim): token by token, head by head."""
        writes, offset = [], 0
        for slab, group in groupby(self.feeds, key=lambda feed: feed.slot.slab):
            slots = [feed.slot.index for feed in group for _ in feed.ids]
            tokens = slice(offset, offset := offset + len(slots))
            rows = {}
            for kv_heads in {keys.shape[1] for keys in slab.keys}:
                first = np.asarray(slots) * (kv_heads * slab.capacity) + np.asarray(places[tokens])
                heads = first[:, None] + np.arange(kv_heads) * slab.capacity
                rows[kv_heads] = index_tensor(heads.ravel(), self._device)
            writes.append((slab, tokens, rows))
        return writes

    def _share(self, bases: list[int], positions: list[int]) -> None:
        """Groups the single tokens by prefix, and maps them to indices in the concatenated outputs of all prefixes."""
        seen: dict[Slot, list[int]] = defaultdict(list)
        for row, feed in enumerate(self.feeds[: self._singles]):
            if feed.prefix is not None:
                seen[feed.prefix].append(row)
        self._shared: list[AttendedSlots] = []
        places: dict[int, int] = {}
        offset = 0
        for batch in by_slab(seen.items()):
            shared = AttendedSlots(batch, bases, positions, [0] * len(bases), self._device)
            self._shared.append(shared)
            places |= dict(zip(shared.rows, (offset + place for place in shared.grid)))
            offset += shared.size
        rows = sorted(places)
        order = [places[row] for row in rows]
        self._prefixed = None if rows == list(range(self._singles)) else index_tensor(rows, self._device)
        self._gathered = None if order == list(range(offset)) else index_tensor(order, self._device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See `AttentionLayout.attend`; also writes the step's keys and values into their slots."""
        heads, tokens, dim = query.shape
        kv_heads = key.shape[0]
        scoring = scoring.within(self._furthest + 1)
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        for slab, chosen, rows in self._writes:
            slab.keys[layer].view(-1, dim).index_copy_(0, rows[kv_heads], key[chosen].reshape(-1, dim))
            slab.values[layer].view(-1, dim).index_copy_(0, rows[kv_heads], value[chosen].reshape(-1, dim))
        grouped = query.transpose(0, 1).reshape(tokens, kv_heads, heads // kv_heads, dim)
        outputs = [self._single(layer, grouped[: self._singles], scoring)] if self._own else []
        for offset, feed in self._spans:
            outputs.append(self._span(layer, grouped[offset : offset + len(feed.ids)], feed, scoring))
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).reshape(tokens, heads, dim)

    def _single(self, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of single tokens over prefix and slot: (tokens, kv_heads, group, head_dim) in and out."""
        own = _concat([each.attend(layer, query[rows], scoring) for rows, each in self._own])
        own = with_sinks(own, None if scoring.sinks is None else scoring.sinks.view(query.shape[1:3]))
        if not self._shared:
            return own[0]
        first = _concat([each.attend(layer, query, scoring) for each in self._shared])
        blind = None
        if scoring.span != (None, None):
            blind = torch.cat([each.blind(scoring) for each in self._shared])[:, None, None]
        if self._gathered is not None:
            first = first[0].index_select(0, self._gathered), first[1].index_select(0, self._gathered)
            blind = None if blind is None else blind.index_select(0, self._gathered)
        if self._prefixed is None:
            return merge_attention(first, own, blind)
        second = own[0].index_select(0, self._prefixed), own[1].index_select(0, self._prefixed)
        return own[0].index_copy(0, self._prefixed, merge_attention(first, second, blind))

    def _span(self, layer: int, query: Tensor, feed: StepInput, scoring: Scoring) -> Tensor:
        """Attention of one row's tokens over its prefix and slot: (count, kv_heads, group, head_dim) in and out."""
        count, kv_heads, group, dim = query.shape
        start = feed.base + feed.start
        first = 0 if scoring.span == (None, None) else int(scoring.first(torch.tensor(start)))
        keys, values = (self._laid(layer, feed, first, which) for which in ("keys", "values"))
        tile = max(min(_TILE, _BIAS_ELEMENTS // (group * (start + count - first))), 1)
        outputs = []
        for begin in range(0, count, tile):
            rows = query[begin : begin + tile]
            length = len(rows)
            end = start + begin + length - first
            bias = self._span_bias(first, start + begin, length, scoring, group)
            heads = rows.transpose(0, 1).reshape(1, kv_heads, length * group, dim)
            part = partial_attention(heads, keys[:, :, :end], values[:, :, :end], bias, scoring)
            sinks = None if scoring.sinks is None else scoring.sinks.view(kv_heads, 1, group).repeat(1, length, 1)
            out, _ = with_sinks(part, None if sinks is None else sinks.flatten(1))
            outputs.append(out.reshape(kv_heads, length, group, dim).transpose(0, 1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _laid(self, layer: int, feed: StepInput, first: int, which: str) -> Tensor:
        """Returns the keys or values from position `first` to the feed's last: (1, kv_heads, positions, head_dim)."""
        begin, end = max(first - feed.base, 0), feed.start + len(feed.ids)
        own = getattr(feed.slot.slab, which)[layer][feed.slot.index : feed.slot.index + 1, :, begin:end]
        if feed.prefix is None or first >= feed.base:
            return own
        slot = feed.prefix
        return torch.cat([getattr(slot.slab, which)[layer][slot.index, None, :, first : feed.base], own], dim=2)

    def _span_bias(self, first: int, start: int, count: int, scoring: Scoring, group: int) -> Tensor:
        """Returns the additive mask (1, 1, count · group, start + count - first) of queries from `start` on, `group` heads
        each, and keys from `first` on."""
        name = first, start, count, scoring.span
        if name not in self._span_biases:
            places = torch.arange(first, start + count, device=self._device)
            mask = scoring.visible(places[start - first :], places)
            self._span_biases[name] = visibility(mask.repeat_interleave(group, dim=0)[None, None], self.dtype)
        return self._span_biases[name]


class Slots:
    """The first `reach` places of several slots of one slab, ordered by index: a view if they are adjacent, else a copy."""

    def __init__(self, slots: Sequence[Slot], reach: int, device: torch.device) -> None:
        self._slab, self.reach = slots[0].slab, reach
        first, last = slots[0].index, slots[-1].index
        adjacent = last - first < len(slots)
        self._range = slice(first, last + 1) if adjacent else slice(None)
        self._chosen = None if adjacent else index_tensor([slot.index for slot in slots], device)

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the layer's keys and values, each (slots, kv_heads, reach, head_dim)."""
        keys, values = (kind[layer][self._range, :, : self.reach] for kind in (self._slab.keys, self._slab.values))
        if self._chosen is not None:
            keys, values = keys.index_select(0, self._chosen), values.index_select(0, self._chosen)
        return keys, values


class AttendedSlots:
    """Attention of single tokens over slots of one slab; the tokens that attend to one slot do so in one matrix product.

    Queries form a grid (slots, width), padded with each slot's first row: `grid[i]` is the index of `rows[i]` in the
    flattened grid of `size` entries.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Slot, Sequence[int]]],
        limits: Sequence[int],
        positions: Sequence[int],
        bases: Sequence[int],
        device: torch.device,
    ) -> None:
        """`parts`: each slot and the rows that attend to it; per row, `limits`: how many of its slot's first places it
        attends to, `positions`: its own in its context, and `bases`: that of the slot's first place."""
        self._slots = Slots([slot for slot, _ in parts], max(limits[row] for _, rows in parts for row in rows), device)
        self._dtype = parts[0][0].slab.keys[0].dtype
        self._width = width = max(len(rows) for _, rows in parts)
        self.rows = [row for _, rows in parts for row in rows]
        self.grid = [place * width + n for place, (_, rows) in enumerate(parts) for n in range(len(rows))]
        table = np.asarray([[*rows] + [rows[0]] * (width - len(rows)) for _, rows in parts], dtype=np.int64)
        seen, flat = np.asarray(limits, dtype=np.int64)[table], table.ravel()
        self.size = len(flat)
        self._plain, self._even = bool((seen == self._slots.reach).all()), bool((seen == seen[:, :1]).all())
        self._table = None if np.array_equal(flat, np.arange(len(limits))) else index_tensor(flat, device)
        self._limits = index_tensor(seen.ravel(), device)[:, None]
        self._positions, self._bases = (
            index_tensor(np.asarray(each, dtype=np.int64)[flat], device)[:, None] for each in (positions, bases)
        )
        self._biases: dict[tuple[int | None, int | None], Tensor | None] = {}

    def _bias(self, scoring: Scoring, group: int) -> Tensor | None:
        """Returns the additive mask (slots, 1, 1 or width · group, reach); None if every row attends to all places."""
        if (span := scoring.span) not in self._biases:
            places, whole = torch.arange(self._slots.reach, device=self._limits.device), span == (None, None)
            mask = places < self._limits
            if not whole:
                mask &= places >= scoring.first(self._positions) - self._bases
            mask = mask.view(-1, 1, self._width, self._slots.reach)
            if whole and self._even:  # one row of mask for all queries of a slot
                mask = mask[:, :, :1]
            elif self._width > 1:
                mask = mask.repeat_interleave(group, dim=2)
            self._biases[span] = None if self._plain and whole else visibility(mask, self._dtype)
        return self._biases[span]

    def blind(self, scoring: Scoring) -> Tensor:
        """Which entries of the grid have all places they attend to outside the window or chunk: (size,) of bool."""
        return (scoring.first(self._positions) - self._bases >= self._limits).flatten()

    def attend(self, layer: int, query: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Maps the queries of all rows (rows, kv_heads, group, head_dim) to the grid's outputs (size, kv_heads, group,
        head_dim) and log-sum-exps (size, kv_heads, group)."""
        kv_heads, group, dim = query.shape[1:]
        width, height = self._width, self.size // self._width
        bias = self._bias(scoring, group)
        chosen = query if self._table is None else query.index_select(0, self._table)
        rows = chosen.view(height, width, kv_heads, group, dim).transpose(1, 2)
        keys, values = self._slots.keys_and_values(layer)
        out, lse = partial_attention(rows.reshape(height, kv_heads, width * group, dim), keys, values, bias, scoring)
        out = out.reshape(height, kv_heads, width, group, dim).transpose(1, 2).reshape(-1, kv_heads, group, dim)
        return out, lse.reshape(height, kv_heads, width, group).transpose(1, 2).reshape(-1, kv_heads, group)


def _concat(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def by_slab(items: Iterable[tuple[Slot, T]]) -> list[list[tuple[Slot, T]]]:
    """Groups (slot, anything) pairs by slab, each group ordered by slot."""
    grouped: dict[Slab, list[tuple[Slot, T]]] = defaultdict(list)
    for item in items:
        grouped[item[0].slab].append(item)
    return [sorted(group, key=lambda item: item[0].index) for group in grouped.values()]


def index_tensor(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Returns an int64 tensor; NumPy converts a list several times faster than PyTorch does. Waits for nothing."""
    return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device, non_blocking=True)
