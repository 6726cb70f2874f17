"""Rollouts with several sequences (the agent rewrote its history) as rows to train on.

Before this, a rollout is one row: counted, scored, compared with its group and filtered as one. `expand_sequences` adds a
row for each earlier sequence after the rollout's main one; the column `main_sequence` is 1 for main rows.

Credit assignment: an estimator of whole rollouts sees one row per rollout, with the sampled tokens of all its sequences in
time order, so the number of sequences makes no difference. If the estimator's record sets `episodes` (those with a critic),
every sequence is a separate episode, whose last token carries the rollout's total: a value is conditioned on a context, and
no context spans two sequences.

Invariant: every sampled token is in one row; rows of a rollout share its `uid` and are adjacent, the main one first; a batch
whose rollouts have one sequence each is returned unchanged, as the same object.
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
    """Adds a row for each earlier sequence with sampled tokens; the rows of `batch` are rollouts.

    The added rows carry their rollout's object columns and no `token_level_scores`: each reward counts once.
    """
    owners, earlier = [], []
    for row, result in enumerate(rollouts_of(batch) if len(batch) else ()):  # on Ray, an empty batch has no columns
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
    """(rows, response_len) scores before any penalty; for `episodes`, the last sampled token of each earlier sequence also
    gets its rollout's total."""
    scores: Tensor = batch.batch["token_level_scores"]
    if not episodes or MAIN_SEQUENCE not in batch.batch:
        return scores
    main = main_rows(batch)
    totals = scores[main].sum(dim=1)[_rollout_of(main)]
    return scores + torch.where(main, 0.0, totals)[:, None] * _at_last_sampled(batch.batch["response_mask"])


def sequence_advantages(name: str, batch: DataProto, rewards: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns by the estimator `name`, each (rows, response_len).

    Args:
        batch: has `response_mask`, `uid`, and the columns that the estimator needs.
        rewards: (rows, response_len), penalties included.
        options: passed to `etude.algorithms.compute_advantage`.
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
    """(rollouts, max sampled tokens) indices into the flattened `mask` of each rollout's sampled tokens, in time order
    (those of the main row last); padded with -1."""
    rollout = _rollout_of(main)
    in_time = torch.argsort(2 * rollout + main, stable=True)
    rows, columns = mask[in_time].nonzero(as_tuple=True)
    counts = torch.bincount(rollout[in_time[rows]], minlength=int(main.sum()))
    places = torch.full((len(counts), int(counts.max())), -1)
    places[torch.arange(places.shape[1]) < counts[:, None]] = in_time[rows] * mask.shape[1] + columns
    return places


def _join(column: Any, places: Tensor, main: Tensor) -> Any:
    """Gathers a column of rows into one of rollouts."""
    if not isinstance(column, Tensor):
        return {name: _join(part, places, main) for name, part in column.items()}
    if column.dim() == 1:
        return column[main]
    return torch.where(places >= 0, column.flatten()[places.clamp(min=0)], 0)


def rollout_numbers(batch: DataProto) -> Tensor:
    """(rows,) index of the rollout that each row belongs to."""
    return _rollout_of(main_rows(batch))


def _rollout_of(main: Tensor) -> Tensor:
    """(rows,) index of each row's rollout: a main row starts a new one."""
    return main.long().cumsum(dim=0) - 1


def _at_last_sampled(mask: Tensor) -> Tensor:
    """(rows, width) 1 at the last 1 of each row of `mask`."""
    last = mask.shape[1] - 1 - mask.flip(dims=(1,)).argmax(dim=1)
    return torch.zeros_like(mask).scatter_(1, last[:, None], 1) * mask
