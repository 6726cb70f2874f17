"""The sequences of a rollout as rows to train on, where an agent rewrote its history and so left several.

Up to here a rollout is one row: counted, scored, compared with its group and filtered as one. `expand_sequences`
puts a row for each earlier sequence after its rollout's main one; the column `main_sequence` is 1 for the main ones.

Credit. An estimator that judges whole rollouts sees main rows only; its advantage holds for all sequences of the rollout,
since they led to the same answer. Where its record says `episodes` (with a critic) every sequence is an episode of its own,
whose last token carries the rollout's total: values are of contexts, and no context spans two sequences.

Invariant: every sampled token is in one row; rows of a rollout share its `uid` and are adjacent, the main one first; a batch
whose rollouts have one sequence each is returned unchanged, the same object.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from etude.agents import to_batch
from etude.agents.batch import OF_SEQUENCES
from etude.algorithms import ADVANTAGE_ESTIMATORS, compute_advantage
from etude.protocol import DataProto
from etude.trainer.rollouts import MAIN_SEQUENCE, concat_batches, main_rows, rollouts_of
from etude.trajectory import Rollout


def expand_sequences(batch: DataProto, pad_token_id: int) -> DataProto:
    """`batch`, whose rows are rollouts, with a row for each earlier sequence in which something was sampled.

    The added rows carry their rollout's object columns and no `token_level_scores`: each reward counts once.
    """
    owners, earlier = [], []
    for row, result in enumerate(rollouts_of(batch)):
        sampled = [sequence for sequence in result.earlier if any(sequence.response_mask)]
        owners += [row] * len(sampled)
        earlier += sampled
    if not earlier:
        return batch
    added = to_batch([Rollout([sequence]) for sequence in earlier], pad_token_id)
    added.batch["token_level_scores"] = torch.zeros_like(added.batch["rollout_log_probs"], dtype=torch.float64)
    shared = {name: column for name, column in batch.non_tensor_batch.items() if name not in OF_SEQUENCES}
    added.non_tensor_batch |= {name: column[owners] for name, column in shared.items()}
    added.meta_info = batch.meta_info
    whole = concat_batches([batch[:], added])
    whole.batch[MAIN_SEQUENCE] = (torch.arange(len(whole)) < len(batch)).long()
    rollout = torch.tensor([*range(len(batch)), *owners])
    return whole.select_idxs(torch.argsort(rollout, stable=True))


def sequence_scores(batch: DataProto, *, episodes: bool) -> Tensor:
    """(rows, response_len) scores before any penalty: as they stand, or, for episodes, with each rollout's total on the
    last sampled token of its earlier sequences too."""
    scores: Tensor = batch.batch["token_level_scores"]
    if not episodes or MAIN_SEQUENCE not in batch.batch:
        return scores
    main = main_rows(batch)
    totals = scores[main].sum(dim=1)[_rollout_of(main)]
    return scores + torch.where(main, 0.0, totals)[:, None] * _at_last_sampled(batch.batch["response_mask"])


def sequence_advantages(name: str, batch: DataProto, rewards: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards as the estimator `name` saw them, advantages and returns, each (rows, response_len).

    Args:
        batch: with `response_mask`, `uid`, and what the estimator needs.
        rewards: (rows, response_len), penalties included.
        options: of `etude.algorithms.compute_advantage`.

    Where sequences are no episodes, what `rewards` holds in a rollout's earlier ones (the penalties there) counts at the
    first sampled token of its main one, and earlier ones have the advantage of that token: all rewards came after them.
    """
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    columns, uids = batch.batch, batch.non_tensor_batch["uid"]
    mask = columns["response_mask"]
    needed: dict[str, Any] = {need: _column(batch, need) for need in estimator.needs}
    if estimator.episodes or MAIN_SEQUENCE not in columns:
        found = compute_advantage(
            name, token_level_rewards=rewards, response_mask=mask, index=uids, **needed, **options
        )
        return rewards, *found
    main = main_rows(batch)
    rollout, first = _rollout_of(main), mask.argmax(dim=1)
    rewards = torch.where(main[:, None], rewards, 0.0).index_put(
        (main.nonzero().squeeze(1)[rollout], first[main][rollout]),
        torch.where(main, 0.0, (rewards * mask).sum(dim=1)),
        accumulate=True,
    )
    found = compute_advantage(
        name,
        token_level_rewards=rewards[main],
        response_mask=mask[main],
        index=uids[main.numpy()],
        **{need: column[main] for need, column in needed.items()},
        **options,
    )
    advantages, returns = (_shared(part, first[main], main, mask) for part in found)
    return rewards, advantages, returns


def _column(batch: DataProto, name: str) -> Tensor:
    """A column by name: (rows, response_len), or (rows,) float64 of a column of numbers."""
    if name in batch.batch:
        return batch.batch[name]
    return torch.tensor(batch.non_tensor_batch[name].tolist(), dtype=torch.float64)


def _shared(part: Tensor, first: Tensor, main: Tensor, mask: Tensor) -> Tensor:
    """(rows, width) of (main rows, width): on their sampled tokens, earlier rows get the value at the main row's `first`
    (main rows,) sampled token."""
    rollout = _rollout_of(main)
    worth = part.gather(1, first[:, None])[rollout]
    return torch.where(main[:, None], part[rollout], torch.where(mask > 0, worth, 0.0))


def rollout_numbers(batch: DataProto) -> Tensor:
    """(rows,) the number of the rollout that each row belongs to."""
    return _rollout_of(main_rows(batch))


def _rollout_of(main: Tensor) -> Tensor:
    """(rows,) the number of each row's rollout: a main row begins one."""
    return main.long().cumsum(dim=0) - 1


def _at_last_sampled(mask: Tensor) -> Tensor:
    """(rows, width) 1 at the last 1 of each row of `mask`."""
    last = mask.shape[1] - 1 - mask.flip(dims=(1,)).argmax(dim=1)
    return torch.zeros_like(mask).scatter_(1, last[:, None], 1) * mask
