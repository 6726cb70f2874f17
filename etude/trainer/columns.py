"""Columns that an estimator's record may need and that no worker computes: derived from rollouts, on demand.

Invariant: equal rollouts have equal columns, in any process, order or batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from numbers import Real
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from etude.errors import ConfigError, DataError
from etude.protocol import DataProto
from etude.trainer.rollouts import main_rows, rollouts_of, sampled_earlier
from etude.trajectory import Provenance, Rollout, Trajectory

Column: TypeAlias = Tensor | Mapping[str, Tensor]
DERIVED = frozenset({"turns", "observations", "reward_components"})  # from the column `rollout`
_SEQUENCE = 1 << 32  # larger than the number of turns of any sequence


def read_column(batch: DataProto, name: str) -> Column:
    """Returns a column of `etude.algorithms.records.COLUMNS`: (rows, response_len), (rows,) or {name: (rows,)}.

    Raises:
        DataError: `observations` of rollouts with images.
    """
    if name in batch.batch:
        return batch.batch[name]
    if name == "reward_components":
        return reward_components(rollouts_of(batch))
    if name in ("turns", "observations"):
        read = turn_numbers if name == "turns" else observations
        rows = [read(sequence, place) for sequence, place in _sequences(batch)]
        found = torch.zeros(batch.batch["response_mask"].shape, dtype=torch.long)
        for row, values in enumerate(rows):
            found[row, : len(values)] = torch.tensor(values, dtype=torch.long)
        return found
    return torch.tensor(batch.non_tensor_batch[name].tolist(), dtype=torch.float64)


def turn_numbers(sequence: Trajectory, place: int = 0) -> list[int]:
    """The assistant turn of each token after the prompt, plus an offset by `place`, the sequence's index in its rollout."""
    return [place * _SEQUENCE + segment.turn for segment in sequence.segments for _ in segment.token_ids]


def observations(sequence: Trajectory, place: int = 0) -> list[int]:
    """For each token after the prompt, a digest of its turn's observation: the tokens since the last turn, or the prompt.

    Raises:
        DataError: later turns may have observed images, which tokens do not identify.
    """
    if sequence.images and sequence.assistant_turns - sequence.first_turn > 1:
        raise DataError(
            f"rollout {sequence.request_id}: observations are compared by their tokens, and a rollout of several turns has "
            "images: choose an estimator that needs no observations"
        )
    found: list[int] = []
    observation, digest, turn = list(sequence.prompt_ids), 0, None
    for segment in sequence.segments:
        if segment.provenance is not Provenance.SAMPLED:
            observation += segment.token_ids
        else:
            if segment.turn != turn:
                data, turn = np.array(observation, dtype=np.int64).tobytes(), segment.turn
                digest = int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
            observation = []
        found += [digest] * len(segment.token_ids)
    return found


def reward_components(rollouts: list[Rollout]) -> dict[str, Tensor]:
    """The rewards by source, as in the metrics `reward/*/mean`, and the scorer's other numbers: name → (rows,) float64, NaN
    for rollouts without one.

    Raises:
        ConfigError: the scorer calls one of its own like a source.
    """
    rows = []
    for rewards in (rollout.trajectory.rewards for rollout in rollouts if rollout.trajectory is not None):
        sources = {"step": sum(value for *_, value in rewards.steps), "final": sum(rewards.final.values())}
        score = {} if rewards.score is None else {"score": rewards.score}
        if taken := [name for name in sources if isinstance(rewards.score_info.get(name), Real)]:
            raise ConfigError(
                f"the scorer returned a number called '{taken[0]}', as the sum of the tools' rewards is",
                fix="give it another name",
            )
        rows.append({n: v for n, v in {**rewards.score_info, **sources, **score}.items() if isinstance(v, Real)})
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: torch.tensor([float(row.get(name, float("nan"))) for row in rows], dtype=torch.float64) for name in names
    }


def _sequences(batch: DataProto) -> list[tuple[Trajectory, int]]:
    """Returns each row's sequence and its index in time among those of its rollout."""
    found: list[tuple[Trajectory, int]] = []
    for is_main, rollout in zip(main_rows(batch).tolist(), rollouts_of(batch)):
        if not is_main:
            place = 0 if found[-1][0] is rollout.trajectory else found[-1][1] + 1
            found.append((sampled_earlier(rollout)[place], place))
        elif rollout.trajectory is not None:
            found.append((rollout.trajectory, len(rollout.earlier)))
    return found
