"""Rollouts with several sequences (the agent rewrote its history) as rows to train on.

Before this, a rollout is one row: counted, scored, compared with its group and filtered as one. `expand_sequences` adds a
row for each earlier sequence after the rollout's main one; the column `main_sequence` is 1 for main rows.

Credit assignment: an estimator of whole rollouts sees one row per rollout, with the sampled tokens of all its sequences in
time order, so the number of sequences makes no difference. If the estimator's record sets `episodes` (those with a critic),
every sequence is a separate episode, whose last token carries the rollout's total: a value is conditioned on a context, and
no context spans two sequences.

If sequences have roles (column `role`), a *part*, the sequences of one role in a rollout, takes the place of the rollout: it
has the role's rewards, and is compared with the parts of the same role name.

Invariant: every sampled token is in one row; rows of a rollout share its `uid` and are adjacent, the main one first; a batch
whose rollouts have one sequence each is returned unchanged, as the same object.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from etude.agents import to_batch
from etude.agents.batch import OF_SEQUENCES, concat_batches, pad_rows
from etude.algorithms import ADVANTAGE_ESTIMATORS, compute_advantage
from etude.algorithms.advantages import running_means
from etude.algorithms.records import RAE_DECAY
from etude.options import RewardOptions
from etude.protocol import DataProto, object_array
from etude.trainer.columns import read_column
from etude.trainer.rollouts import MAIN_SEQUENCE, ROLE, main_rows, parts_of, role_scores, rollouts_of, sampled_earlier
from etude.trajectory import Rollout, role_name


def expand_sequences(batch: DataProto, pad_token_id: int, reward: RewardOptions | None = None) -> DataProto:
    """Adds a row for each earlier sequence with sampled tokens, and, if any has a role, the object column `role`; the rows
    of `batch` are rollouts. `reward` weighs the rewards of roles (default: 1 each).

    The added rows carry their rollout's object columns. Each reward counts once in `token_level_scores`, a step reward at
    its turn, whose sequence that is; if only the main sequence has any, its total is also at the end of each other role.
    """
    results = rollouts_of(batch) if len(batch) else []  # on Ray, an empty batch has no columns
    roles = [result.sequences[-1].role for result in results]
    owners, earlier, placed = [], [], dict[int, list[float]]()
    for row, result in enumerate(results):
        sampled = sampled_earlier(result)
        if sampled:
            placed |= {
                id(each): own for each, own in zip(result.sequences, role_scores(result, reward or RewardOptions()))
            }
        owners += [row] * len(sampled)
        earlier += sampled
    if not earlier:
        if any(roles):
            batch = batch[:]
            batch.non_tensor_batch[ROLE] = object_array(roles)
        return batch
    added = to_batch([Rollout([sequence]) for sequence in earlier], pad_token_id)
    width = added.batch["response_mask"].shape[1]
    added.batch["token_level_scores"] = pad_rows([placed[id(each)] for each in earlier], 0.0, width=width, kind=float)
    shared = {name: column for name, column in batch.non_tensor_batch.items() if name not in OF_SEQUENCES}
    added.non_tensor_batch |= {name: column[owners] for name, column in shared.items()}
    added.meta_info = batch.meta_info
    whole = concat_batches([batch[:], added])
    for row in set(owners):  # without the step rewards of turns that its earlier sequences have
        own = placed[id(results[row].sequences[-1])]
        whole.batch["token_level_scores"][row, : len(own)] = torch.tensor(own, dtype=torch.float64)
    whole.batch[MAIN_SEQUENCE] = (torch.arange(len(whole)) < len(batch)).long()
    roles += [sequence.role for sequence in earlier]
    if any(roles):
        whole.non_tensor_batch[ROLE] = object_array(roles)
    rollout = torch.tensor([*range(len(batch)), *owners])
    return whole.select_idxs(torch.argsort(rollout, stable=True))


def sequence_scores(batch: DataProto, *, episodes: bool) -> Tensor:
    """(rows, response_len) scores before any penalty; for `episodes`, the last sampled token of each earlier sequence also
    gets the total of its rollout, or of its part."""
    scores: Tensor = batch.batch["token_level_scores"]
    if not episodes or MAIN_SEQUENCE not in batch.batch:
        return scores
    number, own = parts_of(batch).number, scores.sum(dim=1)
    totals = torch.zeros(int(number.max()) + 1, dtype=own.dtype).index_add(0, number, own)[number]
    mask = batch.batch["response_mask"]
    last = mask.shape[1] - 1 - mask.flip(dims=(1,)).argmax(dim=1)
    return scores + (totals - own)[:, None] * torch.zeros_like(mask).scatter_(1, last[:, None], 1) * mask


def sequence_advantages(
    name: str, batch: DataProto, rewards: Tensor, *, means: dict[str, float] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Advantages and returns by the estimator `name`, each (rows, response_len).

    Args:
        batch: has `response_mask`, `uid`, and the columns that the estimator needs.
        rewards: (rows, response_len), penalties included.
        means: the running means of `role_baselines`, by "data source/role"; updated.
        options: passed to `etude.algorithms.compute_advantage`.
    """
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    mask, uids = batch.batch["response_mask"], batch.non_tensor_batch["uid"]
    needed: dict[str, Any] = {need: read_column(batch, need) for need in estimator.needs if need != "role_baselines"}
    by_row = MAIN_SEQUENCE not in batch.batch and ROLE not in batch.non_tensor_batch
    if estimator.episodes or (by_row and "role_baselines" not in estimator.needs):
        return compute_advantage(name, token_level_rewards=rewards, response_mask=mask, index=uids, **needed, **options)
    parts = parts_of(batch, siblings=estimator.siblings)
    places = _join_places(parts.number, main_rows(batch), mask)
    joined = places >= 0
    of_parts = _join(rewards, places, parts.first)
    if "role_baselines" in estimator.needs:
        sources = batch.non_tensor_batch.get("data_source", [""] * len(batch))
        keys = [f"{sources[row]}/{role_name(role)}" for row, role in zip(parts.first.tolist(), parts.roles)]
        decay = options.get("decay", RAE_DECAY)
        needed["role_baselines"] = running_means(
            keys, of_parts.double().sum(dim=1), {} if means is None else means, decay
        )
    found = compute_advantage(
        name,
        token_level_rewards=of_parts,
        response_mask=joined.long(),
        index=parts.groups,
        **{
            need: column if need == "role_baselines" else _join(column, places, parts.first)
            for need, column in needed.items()
        },
        **options,
    )
    advantages, returns = (
        torch.zeros_like(rewards).flatten().index_put((places[joined],), part[joined]).view_as(rewards)
        for part in found
    )
    return advantages, returns


def _join_places(number: Tensor, main: Tensor, mask: Tensor) -> Tensor:
    """(parts, max sampled tokens) indices into the flattened `mask` of each part's sampled tokens, in time order (those of
    the main row last); padded with -1."""
    in_time = torch.argsort(2 * number + main, stable=True)
    rows, columns = mask[in_time].nonzero(as_tuple=True)
    counts = torch.bincount(number[in_time[rows]], minlength=int(number.max()) + 1)
    places = torch.full((len(counts), int(counts.max())), -1)
    places[torch.arange(places.shape[1]) < counts[:, None]] = in_time[rows] * mask.shape[1] + columns
    return places


def _join(column: Any, places: Tensor, first: Tensor) -> Any:
    """Gathers a column of rows into one of parts."""
    if not isinstance(column, Tensor):
        return {name: _join(part, places, first) for name, part in column.items()}
    if column.dim() == 1:
        return column[first]
    return torch.where(places >= 0, column.flatten()[places.clamp(min=0)], 0)
