"""Prompts whose keys and values are computed once and shared by every trajectory that begins with them.

The trajectories of a group, members of it that are admitted later, and requests of later rollouts with the same prompt all
use one `Prefix`; a new prompt that begins like a known one copies that beginning. An unused prefix stays until its memory is
needed (least recently used first), there are too many unused ones, or the weights change.

Invariant: places [0, filled) of a prefix's slot hold the keys and values of its first `filled` tokens, under the current
weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from etude.inference.cache import SlabCache, Slot

_BLOCK = 16  # tokens: beginnings are compared in blocks of this many


class Prefix:
    """A prompt, its slot, and how much of it is computed; `users` counts trajectories."""

    def __init__(self, tokens: tuple[int, ...], slot: Slot) -> None:
        self.tokens, self.slot = tokens, slot
        self.filled = self.users = 0
        self.names: list[int] = []

    @property
    def ready(self) -> bool:
        """Whether all of it is computed."""
        return self.filled == len(self.tokens)


class PrefixStore:
    """The prefixes in memory, least recently used first."""

    def __init__(self, cache: SlabCache, *, most_unused: int | None = None) -> None:
        """`most_unused`: maximum unused prefixes that are kept; None: as many as the cache's budget has room for."""
        self._cache, self._most_unused, self._unused = cache, most_unused, 0
        self._known: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._blocks: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._known)

    def join(self, tokens: Sequence[int]) -> Prefix | None:
        """Makes a trajectory a user of the prefix of exactly these tokens; None: no memory for it."""
        name = tuple(tokens)
        prefix = self._known.get(name)
        if prefix is None:
            slot = self._cache.take(len(name))
            if slot is None:
                return None
            prefix = self._known[name] = Prefix(name, slot)
            self._copy_beginning(prefix)
        elif not prefix.users:
            self._unused -= 1
        self._known.move_to_end(name)
        prefix.users += 1
        return prefix

    def leave(self, prefix: Prefix) -> None:
        """The trajectory no longer needs the prefix."""
        prefix.users -= 1
        if prefix.users:
            return
        self._unused += 1
        if self._most_unused is not None and self._unused > self._most_unused:
            self.evict()

    def completed(self, prefix: Prefix) -> None:
        """Lets others copy its beginning from now on."""
        for name in _block_names(prefix.tokens):
            if self._blocks.setdefault(name, prefix) is prefix:
                prefix.names.append(name)

    def _copy_beginning(self, prefix: Prefix) -> None:
        found, length = None, 0
        for i, name in enumerate(_block_names(prefix.tokens), start=1):
            if name not in self._blocks:
                break
            found, length = self._blocks[name], i * _BLOCK
        length = min(length, len(prefix.tokens) - 1)  # the last token is always computed: its logits are needed
        if found is not None and found.tokens[:length] == prefix.tokens[:length]:
            self._cache.copy(found.slot, prefix.slot, length)
            prefix.filled = length

    def evict(self) -> bool:
        """Frees the least recently used of the unused prefixes; False: there is none."""
        unused = next((p for p in self._known.values() if p.users == 0), None)
        if unused is not None:
            self._drop(unused)
        return unused is not None

    def clear_unused(self) -> None:
        """Frees all unused prefixes."""
        for prefix in [p for p in self._known.values() if p.users == 0]:
            self._drop(prefix)

    def _drop(self, prefix: Prefix) -> None:
        del self._known[prefix.tokens]
        self._unused -= 1
        for name in prefix.names:
            del self._blocks[name]
        self._cache.give_back(prefix.slot)


def _block_names(tokens: Sequence[int]) -> Iterator[int]:
    """One hash per prefix of whole blocks."""
    name = 0
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        name = hash((name, *tokens[start : start + _BLOCK]))
        yield name
