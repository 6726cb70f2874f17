"""Splitting work into parts of equal cost: micro-batches (`microbatches`), and the ranks' shares of a batch
(`etude.trainer.minibatches`).

Invariant: every index appears in exactly one part, and the result depends only on the arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_partitions(lengths: Sequence[int], k: int, equal_size: bool = False) -> list[list[int]]:
    """Splits indices into `k` parts with similar sums of `lengths`, by the largest differencing method.

    Karmarkar and Karp 1982: start with one partial solution per item (with `equal_size`, one for each run of k items of
    neighbouring length), then repeatedly merge the two with the largest spread, the heaviest part of one with the
    lightest of the other.

    Args:
        lengths: cost of each item.
        k: number of parts.
        equal_size: all parts have the same number of items; len(lengths) must be divisible by k.

    Returns:
        k lists of indices, each sorted, in order of their first index.

    Raises:
        ValueError: k < 1, fewer items than parts, or a count that `equal_size` cannot split.
    """
    count = len(lengths)
    if k < 1 or count < k or (equal_size and count % k):
        raise ValueError(f"cannot split {count} items into {k} {'equal ' if equal_size else 'non-empty '}parts")
    order = sorted(range(count), key=lambda i: (-lengths[i], i))
    width = k if equal_size else 1
    heap = []
    for serial, start in enumerate(range(0, count, width)):
        parts = [(lengths[i], [i]) for i in order[start : start + width]]
        parts += [(0, [])] * (k - len(parts))
        heap.append(_solution(parts, serial))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, serial, heavy_first = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(heavy_first, reversed(other))]
        heapq.heappush(heap, _solution(merged, serial))
    members = [sorted(items) for _, items in heap[0][2]]
    _fill_empty(members, lengths)
    return sorted(members)


_Parts = list[tuple[int, list[int]]]


def _solution(parts: _Parts, serial: int) -> tuple[int, int, _Parts]:
    """Builds a heap entry: the negated spread (so that the largest comes first), a tie-breaker, parts from heavy to
    light."""
    ordered = sorted(parts, key=lambda part: -part[0])
    return ordered[-1][0] - ordered[0][0], serial, ordered


def _fill_empty(parts: list[list[int]], lengths: Sequence[int]) -> None:
    """Moves single items into parts left empty by zero-cost items or extreme lengths."""
    for part in parts:
        if not part:
            donor = max((p for p in parts if len(p) > 1), key=len)
            part.append(donor.pop(min(range(len(donor)), key=lambda j: lengths[donor[j]])))


def token_budget_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Splits indices into as few balanced parts as possible with at most `max_tokens` each; a longer item is a separate
    part.

    Parts are sorted and in order of their first index, as in `balanced_partitions`, which balances them.
    """
    alone = [[i] for i, length in enumerate(lengths) if length > max_tokens]
    items = [i for i, length in enumerate(lengths) if length <= max_tokens]
    costs = [lengths[i] for i in items]
    for k in range(_min_parts(costs, max_tokens), len(items) + 1):
        parts = balanced_partitions(costs, k)
        if all(sum(costs[j] for j in part) <= max_tokens for part in parts):
            return sorted(alone + [[items[j] for j in part] for part in parts])
    return sorted(alone)


def _min_parts(costs: Sequence[int], budget: int) -> int:
    """A lower bound on the number of parts: by the total, and because at most n items above budget/(n+1) fit one part."""
    by_size = (-(-sum(cost * (n + 1) > budget for cost in costs) // n) for n in range(1, 9))
    return max(1, -(-sum(costs) // budget), *by_size)
