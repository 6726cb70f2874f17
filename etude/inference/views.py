"""Slots of the key/value cache as one batch of keys and values, and attention over it.

A batch of slots is viewed in place if they are close together in one slab; a few scattered ones are copied together, from
several slabs if need be, because each call of the attention kernel costs more than such a copy.

Invariant: what a view adds to the requested slots (idle ones between them, places after their ends) is finite, and masked
or never read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from etude.inference.cache import Slab, Slot
from etude.models.attention import Scoring, partial_attention, visibility

_FEW = 8  # up to so many slots of one slab are copied next to another's rather than attended separately
_PADDING = 1024  # slots times places that such a copy may add
_WORTH_COPYING = 12  # slots; with idle ones among them twice those more

T = TypeVar("T")


def index_tensor(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """int64; NumPy reads a list several times faster than PyTorch does."""
    return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)


def batches(items: Iterable[tuple[Slot, int, T]]) -> list[list[tuple[Slot, T]]]:
    """Groups (slot, visible tokens, anything) by what is attended together, slots of a slab in order: slab by slab, the few
    slots of small groups together."""
    slabs: dict[Slab, list[tuple[Slot, int, T]]] = defaultdict(list)
    for item in items:
        slabs[item[0].slab].append(item)
    found: list[list[tuple[Slot, T]]] = []
    few: list[tuple[int, list[tuple[Slot, T]]]] = []
    for group in slabs.values():
        group.sort(key=lambda item: item[0].index)
        kept = [(slot, value) for slot, _, value in group]
        if len(group) > _FEW:
            found.append(kept)
        else:
            few.append((max(reach for _, reach, _ in group), kept))
    few.sort(key=lambda entry: -entry[0])
    longest = 0
    for reach, kept in few:
        if longest and len(kept) * (longest - reach) <= _PADDING:
            found[-1] += kept
        else:
            found.append(kept)
            longest = reach
    return found


class SlotView:
    """The first `reach` places of some slots. Slot i is entry `places[i]` of the batch, of `height` entries."""

    def __init__(self, slots: Sequence[Slot], reach: int, device: torch.device) -> None:
        self.reach = reach
        runs: list[list[Slot]] = []
        for slot in slots:
            if runs and runs[-1][0].slab is slot.slab:
                runs[-1].append(slot)
            else:
                runs.append([slot])
        first, last = slots[0].index, slots[-1].index
        idle = last + 1 - first - len(slots)
        self._slab = slots[0].slab
        self._range = None
        self._runs: list[tuple[Slab, Tensor, int, int]] = []
        if len(runs) == 1 and (not idle or len(slots) >= _WORTH_COPYING + 2 * idle):
            self._range = slice(first, last + 1)
            self.places, self.height = [slot.index - first for slot in slots], last + 1 - first
            return
        self.places, self.height = list(range(len(slots))), len(slots)
        begin = 0
        for run in runs:
            end = begin + len(run)
            self._runs.append((run[0].slab, index_tensor([slot.index for slot in run], device), begin, end))
            begin = end
        self._copy: tuple[Tensor, Tensor] | None = None

    @property
    def dense(self) -> bool:
        """Whether every entry of the batch is a requested slot."""
        return self.height == len(self.places)

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Each (height, kv_heads, reach, head_dim); what was copied is overwritten by the next call."""
        if self._range is not None:
            keys, values = self._slab.keys[layer], self._slab.values[layer]
            return keys[self._range, :, : self.reach], values[self._range, :, : self.reach]
        if len(self._runs) == 1:
            slab, chosen, _, _ = self._runs[0]
            keys, values = slab.keys[layer][:, :, : self.reach], slab.values[layer][:, :, : self.reach]
            return keys.index_select(0, chosen), values.index_select(0, chosen)
        if self._copy is None:
            shape = (self.height, self._slab.keys[layer].shape[1], self.reach, self._slab.keys[layer].shape[3])
            self._copy = self._slab.keys[layer].new_zeros(shape), self._slab.keys[layer].new_zeros(shape)
        for slab, chosen, begin, end in self._runs:
            reach = min(self.reach, slab.capacity)
            for source, copy in zip((slab.keys[layer], slab.values[layer]), self._copy):
                copy[begin:end, :, :reach] = source[:, :, :reach].index_select(0, chosen)
        return self._copy


class OwnSlots:
    """Rows that feed one token each, over their own slots."""

    def __init__(self, slots: Sequence[Slot], starts: Sequence[int], device: torch.device) -> None:
        """`starts`: the place of each row's token in its slot, the last visible one."""
        self._view = SlotView(slots, max(starts) + 1, device)
        self._dtype = slots[0].slab.keys[0].dtype
        ends = np.zeros(self._view.height, dtype=np.int64)  # idle slots attend to their place 0; the result is not read
        ends[self._view.places] = starts
        self._ends = index_tensor(ends, device)[:, None]
        self._places = None if self._view.dense else index_tensor(self._view.places, device)
        self._even = self._view.dense and len(set(starts)) == 1
        self._biases: dict[int | None, Tensor | None] = {}

    def _bias(self, window: int | None) -> Tensor | None:
        """(height, 1, 1, reach)."""
        if window not in self._biases:
            places = torch.arange(self._view.reach, device=self._ends.device)
            mask = places <= self._ends
            if window is not None:
                mask &= places > self._ends - window
            plain = self._even and window is None
            self._biases[window] = None if plain else visibility(mask[:, None, None], self._dtype)
        return self._biases[window]

    def attend(self, layer: int, query: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Queries (rows, kv_heads, group, head_dim) → the same, and normalisers (rows, kv_heads, group)."""
        keys, values = self._view.keys_and_values(layer)
        if self._places is None:
            return partial_attention(query, keys, values, self._bias(scoring.window), scoring)
        spread = query.new_zeros(self._view.height, *query.shape[1:]).index_copy_(0, self._places, query)
        out, lse = partial_attention(spread, keys, values, self._bias(scoring.window), scoring)
        return out.index_select(0, self._places), lse.index_select(0, self._places)


class SharedPrefixes:
    """Prefixes, each with the rows that see it; the queries of one prefix attend as one product.

    Queries form a grid of (prefixes, width), padded with the first of each prefix: `grid[i]` is the index in the flattened
    grid of the i-th row of `rows`.
    """

    def __init__(
        self, parts: Sequence[tuple[Slot, list[int]]], bases: Sequence[int], positions: Tensor, device: torch.device
    ) -> None:
        """`parts`: slots and the indices of the rows that see them; `bases`: how many tokens of its prefix each row sees;
        `positions`: each row's position in its context."""
        reach = max(bases[row] for _, rows in parts for row in rows)
        self._view = SlotView([slot for slot, _ in parts], reach, device)
        self._width = width = max(len(rows) for _, rows in parts)
        self._dtype = parts[0][0].slab.keys[0].dtype
        table = np.zeros((self._view.height, width), dtype=np.int64)
        self.rows: list[int] = []
        self.grid: list[int] = []
        for place, (_, rows) in zip(self._view.places, parts):
            table[place] = rows + rows[:1] * (width - len(rows))
            self.rows += rows
            self.grid += range(place * width, place * width + len(rows))
        limits = np.asarray(bases, dtype=np.int64)[table]
        used = limits[self._view.places]
        self._plain, self._even = bool((used == reach).all()), bool((limits == limits[:, :1]).all())
        flat = table.ravel()
        whole = len(flat) == len(bases) and bool((flat == np.arange(len(flat))).all())
        self._table = None if whole else index_tensor(flat, device)
        self.size = len(flat)
        self._limits = index_tensor(limits.ravel(), device)[:, None]
        seen_from = positions[: len(bases)]
        self._ends = (seen_from if self._table is None else seen_from.index_select(0, self._table))[:, None]
        self._biases: dict[int | None, Tensor | None] = {}

    def _bias(self, window: int | None, group: int) -> Tensor | None:
        """(height, 1, 1 or width · group, reach)."""
        if window not in self._biases:
            places = torch.arange(self._view.reach, device=self._ends.device)
            mask = places < self._limits
            if window is not None:
                mask &= places > self._ends - window
            mask = mask.view(self._view.height, 1, self._width, -1)
            if window is None and self._even:  # one row of mask for all queries of a prefix
                mask = mask[:, :, :1]
            else:
                mask = mask.repeat_interleave(group, dim=2)
            self._biases[window] = None if self._plain and window is None else visibility(mask, self._dtype)
        return self._biases[window]

    def blind(self, window: int) -> Tensor:
        """Which entries of the grid no longer see any of their prefix: (size,) of bool."""
        return (self._ends - window >= self._limits - 1).flatten()

    def attend(self, layer: int, query: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Of all rows (rows, kv_heads, group, head_dim) the grid's: (size, kv_heads, group, head_dim), and normalisers."""
        kv_heads, group, dim = query.shape[1:]
        height, width = self._view.height, self._width
        bias = self._bias(scoring.window, group)
        chosen = query if self._table is None else query.index_select(0, self._table)
        rows = chosen.view(height, width, kv_heads, group, dim).transpose(1, 2)
        keys, values = self._view.keys_and_values(layer)
        out, lse = partial_attention(rows.reshape(height, kv_heads, width * group, dim), keys, values, bias, scoring)
        out = out.reshape(height, kv_heads, width, group, dim).transpose(1, 2).reshape(-1, kv_heads, group, dim)
        return out, lse.reshape(height, kv_heads, width, group).transpose(1, 2).reshape(-1, kv_heads, group)
