"""Mini-batches of whole prompt groups, and the epochs of updates over them.

Invariant: every row is in exactly one mini-batch an epoch; rows of one prompt stay together; the mini-batches of an epoch
differ in size by at most one group, so that no update rests on a handful of rows. The order depends only on the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from etude.metrics import Metrics, add_metrics
from etude.protocol import DataProto
from etude.seeds import mini_batch_order


def mini_batches(data: DataProto, groups: int, *, shuffle: bool, seed: Sequence[int]) -> Iterator[DataProto]:
    """Mini-batches of about `groups` prompts (never more); a group is the rows that share a `uid`."""
    order: dict[Any, list[int]] = {}
    for row, uid in enumerate(data.non_tensor_batch["uid"].tolist()):
        order.setdefault(uid, []).append(row)
    members = list(order.values())
    numbers = np.arange(len(members))
    if shuffle:
        numbers = mini_batch_order(seed, len(members))
    for part in np.array_split(numbers, max(1, -(-len(members) // groups))):
        rows = [row for number in part for row in members[number]]
        if rows:
            yield data.select_idxs(rows)


def update_epochs(
    data: DataProto,
    update: Callable[[DataProto], Metrics],
    *,
    epochs: int,
    groups: int,
    shuffle: bool,
    seed: int,
) -> Metrics:
    """Calls `update` on every mini-batch of every epoch; needs meta_info `global_step`. Returns its metrics, added up."""
    parts: list[Metrics] = []
    for epoch in range(epochs):
        order = (seed, data.meta_info["global_step"], epoch)
        parts += [update(mini) for mini in mini_batches(data, groups, shuffle=shuffle, seed=order)]
    return add_metrics(parts)
