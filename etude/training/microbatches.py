"""Micro-batches: rows that are packed and computed together, split by a token budget; and the passes over those of a batch.

Invariant: every row with a scored token is in exactly one micro-batch. Rows with the same prompt stay together if the budget
allows, so that the prompt is computed once for all of them; shared tokens count once against the budget. A row longer than
the budget is a separate micro-batch. The split depends only on the batch and the budget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from etude.models.packable import use_packing
from etude.models.vision import Vision
from etude.protocol import DataProto
from etude.training.images import check_images
from etude.training.optim import OptimizerSet
from etude.training.packing import PackedRows, needed_tokens, pack, prefix_tree, scored_rows
from etude.training.partitions import balanced_partitions, token_budget_batches
from etude.training.sharding import compute_device, count_passes, delay_sums
from etude.training.ulysses import SequenceTeam


class Learner(ABC):
    """What the training engines of policy and critic share: a model that computes a batch in micro-batches."""

    def __init__(
        self, model: Any, body: Any, max_tokens: int, optimizer: OptimizerSet | None, team: SequenceTeam | None
    ) -> None:
        """Switches `body`, the language model in `model`, to packed attention; one that cannot run so computes one row a
        forward pass.

        Args:
            max_tokens: token budget of a micro-batch, for each rank of a team.
            team: the ranks that get the same rows and compute each of them together.

        Raises:
            ConfigError: the team cannot share the model.
        """
        self.model, self.optimizer, self._team = model, optimizer, team
        self._max_tokens = max_tokens if use_packing(body) else 1  # 1: each row is a micro-batch of its own
        if team is not None:
            team.check(body)
            self._max_tokens *= team.size
        self._device, self._vision = compute_device(model), Vision.of(model.config)
        self.progress = (0, 0)  # micro-batches of the current mini-batch that are done, and all; read by another thread

    @abstractmethod
    def _score(self, packed: PackedRows) -> Tensor:
        """Computes log-probs or values of packed rows."""

    def _passes(
        self, batch: DataProto, *, learns: bool = False, alone: bool = False
    ) -> Iterator[tuple[list[int], PackedRows]]:
        """Yields the row indices of each micro-batch, and these rows packed. While other ranks of a sharded model still have
        some, this one computes a dummy. `learns`: each pass has a backward pass, the dummy's of a zero gradient. `alone`:
        `batch` is this rank's, and its team, if any, has another."""
        check_images(batch, self.model.config)
        micros = micro_batches(batch, self._max_tokens, self._vision)
        passes = count_passes(self.model, len(micros))
        for number in range(passes):
            if learns:
                delay_sums(self.model, number == passes - 1)
                self.progress = min(number, len(micros)), len(micros)
            if number < len(micros):
                rows = micros[number]
                yield rows, pack(batch, rows, self._device, self._vision, None if alone else self._team)
                continue
            idle = self._score(pack(_filler(), [0], self._device, team=self._team)).sum() * 0
            if learns:
                assert self.optimizer is not None
                self.optimizer.backward(idle)
        if learns:
            self.progress = len(micros), len(micros)


def micro_batches(batch: DataProto, max_tokens: int, vision: Vision | None = None) -> list[list[int]]:
    """Returns the row indices of each micro-batch, sorted; needs `input_ids`, `attention_mask`, `response_mask`.

    `vision`: as for `pack`. An image counts as many tokens as it has placeholders.
    """
    rows = scored_rows(batch)
    tokens = dict(zip(rows, needed_tokens(batch, rows, vision)))
    units = [part for group in _groups(batch, rows) for part in _within_budget(group, tokens, max_tokens)]
    costs = [_cost([tokens[row] for row in unit]) for unit in units]
    parts = token_budget_batches(costs, max_tokens)
    return sorted(sorted(row for unit in part for row in units[unit]) for part in parts)


def _filler() -> DataProto:
    """Returns a dummy batch: one row with one scored token."""
    ids = torch.zeros(1, 2, dtype=torch.long)
    ones = torch.ones_like(ids)
    return DataProto.from_single_dict({"input_ids": ids, "attention_mask": ones, "response_mask": ones[:, 1:]})


def _groups(batch: DataProto, rows: Sequence[int]) -> list[list[int]]:
    """Groups rows by prompt. If the columns have no prompt part (demonstrations), each row is a group."""
    width = batch.batch["input_ids"].shape[1] - batch.batch["response_mask"].shape[1]
    prompts = batch.batch["input_ids"][:, :width].cpu().numpy()
    masks = batch.batch["attention_mask"][:, :width].cpu().numpy()
    groups: dict[object, list[int]] = {}
    for row in rows:
        groups.setdefault((prompts[row].tobytes(), masks[row].tobytes()) if width else row, []).append(row)
    return list(groups.values())


def _within_budget(group: list[int], tokens: dict[int, list[Any]], max_tokens: int) -> list[list[int]]:
    """Splits the group into as few parts of similar length as fit the budget."""
    lengths = [len(tokens[row]) for row in group]
    fewest = max(1, -(-_cost([tokens[row] for row in group]) // max_tokens))
    for count in range(fewest, len(group)):
        parts = [[group[i] for i in part] for part in balanced_partitions(lengths, count)]
        if all(_cost([tokens[row] for row in part]) <= max_tokens for part in parts):
            return parts
    return [[row] for row in group]


def _cost(sequences: Sequence[Sequence[Any]]) -> int:
    """Number of packed tokens for these sequences."""
    return len(prefix_tree(sequences)[0])
