"""The sequences of a rollout as rows to train on, where an agent rewrote its history and so left several.

Up to here a rollout is one row: counted, scored, compared with its group and filtered as one. `expand_sequences`
puts a row for each earlier sequence after its rollout's main one; the column `main_sequence` is 1 for the main ones.

Credit. An estimator that judges rollouts sees one row for each: the sampled tokens of all its sequences in time order, so
that it makes no difference into how many sequences these were cut. Where its record says `episodes` (with a critic) every
sequence is an episode of its own, whose last token carries the rollout's total: values are of contexts, and no context spans
two sequences.

Invariant: every sampled token is in one row; rows of a rollout share its `uid` and are adjacent, the main one first; a batch
whose rollouts have one sequence each is returned unchanged, the same object.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from etude.agents import to_batch
from etude.agents.batch import OF_SEQUENCES, concat_batches
from etude.algorithms import ADVANTAGE_ESTIMATORS, compute_advantage
from etude.protocol import DataProto
from etude.trainer.columns import read_column
from etude.trainer.rollouts import MAIN_SEQUENCE, main_rows, rollouts_of, sampled_earlier
from etude.trajectory import Rollout


def expand_sequences(batch: DataProto, pad_token_id: int) -> DataProto:
    """`batch`, whose rows are rollouts, with a row for each earlier sequence in which something was sampled.

    The added rows carry their rollout's object columns and no `token_level_scores`: each reward counts once.
    """
    owners, earlier = [], []
    for row, result in enumerate(rollouts_of(batch) if len(batch) else ()):  # no rows on Ray: no columns either
        sampled = sampled_earlier(result)
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


def sequence_advantages(name: str, batch: DataProto, rewards: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns by the estimator `name`, each (rows, response_len).

    Args:
        batch: with `response_mask`, `uid`, and what the estimator needs.
        rewards: (rows, response_len), penalties included.
        options: of `etude.algorithms.compute_advantage`.
    """
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    mask, uids = batch.batch["response_mask"], batch.non_tensor_batch["uid"]
    needed: dict[str, Any] = {need: read_column(batch, need) for need in estimator.needs}
    if estimator.episodes or MAIN_SEQUENCE not in batch.batch:
        return compute_advantage(name, token_level_rewards=rewards, response_mask=mask, index=uids, **needed, **options)
    main = main_rows(batch)
    places = _join_places(main, mask)
    joined = places >= 0
    found = compute_advantage(
        name,
        token_level_rewards=_join(rewards, places, main),
        response_mask=joined.long(),
        index=uids[main.numpy()],
        **{need: _join(column, places, main) for need, column in needed.items()},
        **options,
    )
    advantages, returns = (
        torch.zeros_like(rewards).flatten().index_put((places[joined],), part[joined]).view_as(rewards)
        for part in found
    )
    return advantages, returns


def _join_places(main: Tensor, mask: Tensor) -> Tensor:
    """(rollouts, most sampled tokens) the places in the flattened `mask` of each rollout's sampled tokens, in time order
    (the main row's last); -1 after them."""
    rollout = _rollout_of(main)
    in_time = torch.argsort(2 * rollout + main, stable=True)
    rows, columns = mask[in_time].nonzero(as_tuple=True)
    counts = torch.bincount(rollout[in_time[rows]], minlength=int(main.sum()))
    places = torch.full((len(counts), int(counts.max())), -1)
    places[torch.arange(places.shape[1]) < counts[:, None]] = in_time[rows] * mask.shape[1] + columns
    return places


def _join(column: Any, places: Tensor, main: Tensor) -> Any:
    """A column of rows as one of rollouts."""
    if not isinstance(column, Tensor):
        return {name: _join(part, places, main) for name, part in column.items()}
    if column.dim() == 1:
        return column[main]
    return torch.where(places >= 0, column.flatten()[places.clamp(min=0)], 0)


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
