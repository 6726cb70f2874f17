"""Mini-batches of whole prompt groups, each split into one part per rank.

Invariant: every row is in exactly one mini-batch per epoch, and there in one rank's part; rows of one prompt are in the same
mini-batch; the mini-batches of an epoch differ in size by at most one group, so that no update is computed from only a few
rows. The order depends only on the seed. Each part carries the counts of its whole mini-batch, so that the ranks' losses add
up to the loss of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etude.algorithms import PolicyLoss
from etude.options import ActorOptions, CriticOptions
from etude.protocol import DataProto
from etude.seeds import mini_batch_order
from etude.trainer.rollouts import main_rows
from etude.training import balanced_partitions, count_scored

_WHOLE_GROUPS = 4  # with at least this many prompts per rank, a prompt's rows share a rank and its prefix computation


def count_updates(prompts: int, options: ActorOptions | CriticOptions) -> int:
    """Number of optimizer steps on a batch of this many prompts."""
    return options.ppo_epochs * -(-prompts // options.ppo_mini_batch_size)


def update_parts(
    data: DataProto, options: ActorOptions | CriticOptions, shuffle: bool, seed: int, ranks: int, number: int
) -> list[DataProto]:
    """Returns each rank's part of optimizer step `number` on `data`; meta_info needs `global_step`. Its `compare_rollout` is
    kept for the first step only, where the weights are still the old ones."""
    epoch, place = divmod(number, count_updates(len(_groups(data)), options) // options.ppo_epochs)
    order = (seed, data.meta_info["global_step"], epoch)
    mini = data.select_idxs(mini_rows(data, options.ppo_mini_batch_size, shuffle=shuffle, seed=order)[place])
    mini.meta_info["update"] = number
    mini.meta_info["compare_rollout"] = bool(data.meta_info.get("compare_rollout")) and number == 0
    return rank_parts(_for_update(mini, options), ranks)


def _for_update(mini: DataProto, options: ActorOptions | CriticOptions) -> DataProto:
    """Adds the tokens that the policy loss selects over the whole mini-batch; removes columns that it does not read."""
    if not isinstance(options, ActorOptions) or (record := options.policy_loss.record) is None:
        return mini
    columns = mini.batch
    if record.selects is not None:
        read = {name: columns[name] for name in (*record.needs, "advantages", "response_mask")}
        columns["selected_tokens"] = record.select_tokens(**read, **options.loss_options())
    kept = options.needs | {"old_log_probs", "rollout_log_probs"}
    return mini.select(sorted(set(columns.keys()) - (PolicyLoss.columns - kept)))


def mini_rows(data: DataProto, groups: int, *, shuffle: bool, seed: Sequence[int]) -> list[list[int]]:
    """Row indices of mini-batches of about `groups` prompts (never more); a group is the rows that share a `uid`."""
    members = _groups(data)
    if not members:
        return []
    numbers = mini_batch_order(seed, len(members)) if shuffle else np.arange(len(members))
    parts = np.array_split(numbers, -(-len(members) // groups))
    return [[row for number in part for row in members[number]] for part in parts]


def rank_parts(mini: DataProto, ranks: int) -> list[DataProto]:
    """Divides a mini-batch's rows over `ranks`, balanced by token count and in their order; parts may be empty."""
    mini.meta_info |= count_scored(mini, main_rows(mini))
    if ranks == 1:
        return [mini]
    units = _groups(mini) if "uid" in mini.non_tensor_batch else []
    if len(units) < _WHOLE_GROUPS * ranks:
        units = [[row] for row in range(len(mini))]
    columns = mini.batch
    trained = columns["response_mask"].any(dim=1)  # rows without a token to train on are skipped
    tokens = (columns["attention_mask"].sum(dim=1) * trained).tolist()
    lengths = [sum(tokens[row] for row in unit) for unit in units]
    filled = balanced_partitions(lengths, min(ranks, len(units)))
    parts = [sorted(row for unit in part for row in units[unit]) for part in filled]
    return [mini.select_idxs(rows) for rows in [*parts, *[[]] * (ranks - len(parts))]]


def _groups(data: DataProto) -> list[list[int]]:
    order: dict[Any, list[int]] = {}
    for row, uid in enumerate(data.non_tensor_batch["uid"].tolist()):
        order.setdefault(uid, []).append(row)
    return list(order.values())
