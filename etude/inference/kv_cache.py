"""The KV cache: slots of a few sizes, allocated from slabs, under one memory budget; and shared prompt prefixes.

A slot holds the keys and values of one run of tokens (a prompt that trajectories share, or one trajectory's tokens after
it), from place 0. Slots of one size are adjacent in a slab, so that a decode step attends over a slice of the slab instead
of gathering rows, and rows that are computed together have similar lengths. Sizes grow by factors of at most 1.5, so at
least two thirds of a filled slot are in use; a run that outgrows its slot moves to the next size.

Prompts are computed once: the trajectories of a group, even those admitted later, and requests of later rollouts with the
same prompt all use one `Prefix`. What several prompts begin with, such as a system message and tools, is computed for one of
them and copied to the others, whenever they come: a tree of all prefixes finds one that has the most of a new prompt. An
unused prefix stays until its memory is needed (least recently used first), there are too many unused ones, or the weights
change.

Invariant: all slabs together never exceed the budget; a slab without a slot in use is freed. Which slot is allocated
depends only on which are in use, so the same requests get the same slots in every run. Places [0, filled) of a prefix's
slot hold the keys and values of its first `filled` tokens, under the current weights.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.chat.encoding import common_beginning
from etude.models.experts import routers
from etude.models.packable import key_widths
from etude.models.packed import is_packed

_SMALLEST = 64
_BLOCK = 32  # tokens between the nodes of the tree of prefixes
_SLAB_SLOTS = 64  # beyond this, slices of keys spill the CPU cache and the time per token rises
_SLAB_BYTES = 64 << 20
_BUDGET_SLABS = 16  # a slab of several slots takes at most 1/_BUDGET_SLABS of the budget


@dataclass(frozen=True)
class KVShape:
    """The shape of one token's keys and values: `widths` (kv_heads, head_dim) of each layer. `experts`: (layers, experts per
    token) if the ids of its experts are cached too (routing replay)."""

    widths: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: torch.device
    experts: tuple[int, int] | None = None

    @classmethod
    def of(cls, model: Any, keep_experts: bool = False) -> KVShape:
        """Returns the shape for a Hugging Face causal LM; `keep_experts`: whether to cache each token's experts too."""
        weight = next(model.parameters())
        return cls(
            # Without packed attention, keys, values and states are in Transformers' own caches: see `RowCaches`.
            widths=tuple(key_widths(model)) if is_packed(model) else ((1, 1),),
            dtype=weight.dtype,
            device=weight.device,
            experts=(len(routers(model)), model.config.num_experts_per_tok) if keep_experts else None,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes per token, over all layers."""
        experts = 2 * math.prod(self.experts) if self.experts else 0
        return 2 * sum(map(math.prod, self.widths)) * self.dtype.itemsize + experts


class Slab:
    """`slots` slots of `capacity` tokens: per layer, keys and values (slots, kv_heads, capacity, head_dim); `experts`
    (slots, capacity, layers, experts per token) if these are cached."""

    def __init__(self, shape: KVShape, capacity: int, slots: int) -> None:
        sizes = [(slots, kv_heads, capacity, head_dim) for kv_heads, head_dim in shape.widths]
        self.keys, self.values = ([_zeros(size, shape) for size in sizes] for _ in range(2))
        self.experts = np.zeros((slots, capacity, *shape.experts), np.int16) if shape.experts else None
        self.capacity, self.slots = capacity, slots
        self.free = list(range(slots))


@dataclass(frozen=True, eq=False)
class Slot:
    """An allocated slot: one index of a slab."""

    slab: Slab
    index: int

    @property
    def capacity(self) -> int:
        return self.slab.capacity


class SlabCache:
    """Allocates slots from slabs, within the budget."""

    def __init__(self, shape: KVShape, budget_bytes: int | None = None) -> None:
        """`budget_bytes`: the limit for all slabs; None: memory grows as needed."""
        self.shape, self._budget = shape, budget_bytes
        self._slabs: list[Slab] = []

    @property
    def slab_bytes(self) -> int:
        return sum(slab.slots * slab.capacity for slab in self._slabs) * self.shape.token_bytes

    def take(self, length: int) -> Slot | None:
        """Allocates a slot with room for `length` tokens; None if the budget is used up."""
        capacity = capacity_for(length)
        slab = next((s for s in self._slabs if s.capacity == capacity and s.free), None) or self._add(capacity)
        if slab is None:  # a slot that is too large is better than none
            larger = [s for s in self._slabs if s.capacity > capacity and s.free]
            slab = min(larger, key=lambda s: s.capacity, default=None)
        return None if slab is None else Slot(slab, heapq.heappop(slab.free))

    def _add(self, capacity: int) -> Slab | None:
        slot_bytes = capacity * self.shape.token_bytes
        slots = min(_SLAB_SLOTS, max(_SLAB_BYTES // slot_bytes, 1))
        if self._budget is not None:  # no single slab may take most of the budget
            slots = min(slots, max(self._budget // _BUDGET_SLABS // slot_bytes, 1))
            slots = min(slots, (self._budget - self.slab_bytes) // slot_bytes)
        if slots < 1:
            return None
        slab = Slab(self.shape, capacity, slots)
        self._slabs.append(slab)
        return slab

    def give_back(self, slot: Slot) -> None:
        """Frees a slot, and its slab if no other slot of it is in use."""
        heapq.heappush(slot.slab.free, slot.index)
        if len(slot.slab.free) == slot.slab.slots:
            self._slabs.remove(slot.slab)

    @staticmethod
    def copy(source: Slot, target: Slot, length: int) -> None:
        """Copies the first `length` tokens of a slot to another."""
        pairs = zip(source.slab.keys + source.slab.values, target.slab.keys + target.slab.values)
        for old, new in pairs:
            new[target.index, :, :length] = old[source.index, :, :length]
        if target.slab.experts is not None and source.slab.experts is not None:
            target.slab.experts[target.index, :length] = source.slab.experts[source.index, :length]


class Prefix:
    """A prompt with its slot; `filled`: how many of its tokens are computed; `users`: how many trajectories use it.

    `like`: an earlier prefix that begins with the same `common` tokens, which are copied from it rather than computed.
    """

    def __init__(self, tokens: tuple[int, ...], slot: Slot) -> None:
        self.tokens, self.slot = tokens, slot
        self.filled = self.users = self.common = 0
        self.like: Prefix | None = None

    @property
    def ready(self) -> bool:
        """Whether all of it is computed."""
        return self.filled == len(self.tokens)


class PrefixStore:
    """The cached prefixes, least recently used first."""

    def __init__(self, cache: SlabCache, *, most_unused: int | None = None) -> None:
        """`most_unused`: maximum number of unused prefixes to keep; None: as many as fit into the cache's budget."""
        self._cache, self._most_unused, self._unused = cache, most_unused, 0
        self._known: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._tree: dict[int, Prefix] = {}  # node: a prefix's first tokens, whole blocks of them, by `_nodes`

    def __len__(self) -> int:
        return len(self._known)

    def join(self, tokens: Sequence[int]) -> Prefix | None:
        """Adds a user to the prefix of exactly these tokens, which is allocated if needed; None: not enough memory."""
        name = tuple(tokens)
        prefix = self._known.get(name)
        if prefix is None:
            slot = self._cache.take(len(name))
            if slot is None:
                return None
            prefix = Prefix(name, slot)
            like = next((self._tree[node] for node in reversed([*_nodes(name)]) if node in self._tree), None)
            if like is not None:  # the last token is always computed: its logits are needed
                prefix.like, prefix.common = like, min(common_beginning(like.tokens, name), len(name) - 1)
                self._known.move_to_end(like.tokens)
            self._known[name] = prefix
            for node in _nodes(name):
                self._tree.setdefault(node, prefix)
        elif not prefix.users:
            self._unused -= 1
        self._known.move_to_end(name)
        prefix.users += 1
        return prefix

    def leave(self, prefix: Prefix) -> None:
        """Removes a user; evicts an unused prefix if there are more than `most_unused`."""
        prefix.users -= 1
        if prefix.users:
            return
        self._unused += 1
        if self._most_unused is not None and self._unused > self._most_unused:
            self.evict()

    def evict(self) -> bool:
        """Evicts the least recently used of the unused prefixes; False: there is none."""
        unused = next((p for p in self._known.values() if p.users == 0), None)
        if unused is not None:
            self._drop(unused)
        return unused is not None

    def clear_unused(self) -> None:
        for prefix in [p for p in self._known.values() if p.users == 0]:
            self._drop(prefix)

    def copy_beginning(self, prefix: Prefix, computing: Collection[Prefix]) -> bool:
        """Copies what `prefix.like` has of a prefix that is not begun. False: that is still being computed, by one of
        `computing`: wait for it."""
        like = prefix.like
        if like is None or prefix.filled:
            return True
        if self._known.get(like.tokens) is like:
            if like.filled < prefix.common and like in computing:
                return False
            prefix.filled = min(like.filled, prefix.common)
            self._cache.copy(like.slot, prefix.slot, prefix.filled)
        prefix.like = None
        return True

    def _drop(self, prefix: Prefix) -> None:
        del self._known[prefix.tokens]
        for node in _nodes(prefix.tokens):
            if self._tree.get(node) is prefix:
                del self._tree[node]
        self._unused -= 1
        self._cache.give_back(prefix.slot)


def _nodes(tokens: tuple[int, ...]) -> Iterator[int]:
    """Yields a hash of the first block, of the first two, and so on; the caller compares the tokens."""
    node = 0
    for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
        node = hash((node, tokens[end - _BLOCK : end]))
        yield node


def _zeros(size: tuple[int, ...], shape: KVShape) -> Tensor:
    """Returns zeros. On the CPU they come from NumPy, whose untouched pages take no memory; PyTorch would write them."""
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    raw = np.zeros(math.prod(size) * shape.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(shape.dtype).view(size)


def capacity_for(length: int) -> int:
    """Returns the smallest of the sizes 64, 128, 192, 256, 384, 512, 768 … that holds `length` tokens."""
    power = max(_SMALLEST, 1 << max(length - 1, 0).bit_length())
    return 3 * power // 4 if length <= 3 * power // 4 and power > 2 * _SMALLEST else power


def most_tokens(shape: KVShape, budget_bytes: int) -> int:
    """Returns the longest context that fits into the budget alone, however it is split into prefix and own tokens."""
    guaranteed = budget_bytes - 2 * (budget_bytes // _BUDGET_SLABS)  # two slabs may have unused slots
    return max(int((guaranteed // shape.token_bytes - 2 * _SMALLEST) / 1.5), 0)
