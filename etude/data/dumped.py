"""Rollout dumps as training data: rollouts to imitate, and preference pairs of rollouts of one prompt.

Invariant: token ids and provenance are the dump's own; nothing is re-rendered or re-tokenised. The sequences of a
rollout stay together, unless its roles have rewards of their own: then those of each role do, with its reward.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.data.files import located_rows
from etude.dumps import sequences_of, trajectory_from_record
from etude.errors import DataError
from etude.trajectory import Provenance, Run, Trajectory

Sequences = tuple[list[Run], ...]


@dataclass(frozen=True)
class DumpedRollout:
    """A rollout of a dump, or a role's part of one: its location, the prompt it answers (in one step of one run, in which
    role), its score (-inf where nobody gave one) and its sequences."""

    place: str
    prompt: tuple[str, str, str]
    score: float
    sequences: Sequences


def is_dump(file: str) -> bool:
    """Whether the first row of a data file is a rollout rather than a conversation."""
    _, row = next(iter(located_rows(file)))
    return "prompt_ids" in row and "segments" in row


def read_dumps(files: Sequence[str]) -> list[DumpedRollout]:
    """Reads the rollouts of dump files, in order; those without a sampled token are skipped.

    Raises:
        DataError: a row is not a rollout, or has images, whose pixels a dump does not hold; names file and row.
    """
    return [found for file in files for place, row in located_rows(file) for found in _rollouts(file, place, row)]


def _rollouts(file: str, place: str, row: Mapping[str, Any]) -> Iterator[DumpedRollout]:
    score = row.get("score")
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    if score is not None and not (is_number and math.isfinite(score)):
        raise DataError(f"{place}: score must be a finite number or null, got {score!r:.80}")
    try:
        records = sequences_of(row)
        made = [trajectory_from_record(record) for record in records]
    except (DataError, ValueError) as error:
        raise DataError(f"{place}: {error}") from error
    if any(record.get("images") for record in records):
        raise DataError(f"{place}: the rollout has images, and a dump does not hold their pixels")
    for role, own, part in _parts(row, -math.inf if score is None else float(score), made):
        if learned := tuple(_runs(each) for each in part if any(each.response_mask)):
            yield DumpedRollout(place, (file, _prompt(row, place), role), own, learned)


def _prompt(row: Mapping[str, Any], place: str) -> str:
    """Names a rollout's prompt: runs number theirs alike, and a file may hold the dumps of several."""
    if row.get("uid") is None:
        return place
    return json.dumps([row.get(name) for name in ("uid", "data_source", "index", "gts")], default=str)


def _parts(
    row: Mapping[str, Any], score: float, made: Sequence[Trajectory]
) -> Iterator[tuple[str, float, Sequence[Trajectory]]]:
    """The role, score and sequences of each role; the rollout as a whole where its roles have one reward."""
    *earlier, main = made
    if not any(each.rewards.given for each in earlier):
        yield "", score, made
        return
    weights = row.get("reward_weights") or {"tool": 1.0, "score": 1.0}
    for role in dict.fromkeys(each.role for each in made):
        part = [each for each in made if each.role == role]
        own = sum(each.rewards.total(weights["tool"], weights["score"]) for each in part)
        yield role, score if role == main.role else own, part


def _runs(trajectory: Trajectory) -> list[Run]:
    segments = ((list(segment.token_ids), segment.provenance) for segment in trajectory.segments)
    return [(list(trajectory.prompt_ids), Provenance.TEMPLATE), *segments]


def select_rollouts(
    rollouts: Sequence[DumpedRollout], min_score: float | None, max_per_prompt: int | None
) -> list[DumpedRollout]:
    """Selects rollouts to imitate (rejection sampling): those with a score of at least `min_score`, and of these the
    best `max_per_prompt` of each prompt; ties go to the earlier one, and those without a score come last.

    Raises:
        DataError: none is left.
    """
    kept = [best for group in _ranked(rollouts) for best in group[:max_per_prompt] if _reaches(best, min_score)]
    if not kept:
        raise DataError(f"none of {len(rollouts)} rollouts has a score of at least data.min_score={min_score}")
    return kept


def rank_pairs(
    rollouts: Sequence[DumpedRollout], min_score: float | None, max_per_prompt: int | None
) -> list[tuple[DumpedRollout, DumpedRollout]]:
    """Pairs the rollouts of each prompt as (chosen, rejected): the best with the worst, the second-best with the
    second-worst and so on, if their scores differ and the chosen one has at least `min_score`; at most `max_per_prompt`
    pairs per prompt.

    Raises:
        DataError: there is no pair.
    """
    pairs = []
    for group in _ranked([each for each in rollouts if each.score > -math.inf]):
        for chosen, rejected in list(zip(group[: len(group) // 2], reversed(group)))[:max_per_prompt]:
            differ = chosen.score - rejected.score > max(1e-6, 1e-8 * max(abs(chosen.score), abs(rejected.score)))
            if differ and _reaches(chosen, min_score):
                pairs.append((chosen, rejected))
    if not pairs:
        raise DataError(
            f"{len(rollouts)} rollouts make no pair: of no prompt have two different scores, the better at least "
            f"data.min_score={min_score}"
        )
    return pairs


def _reaches(rollout: DumpedRollout, min_score: float | None) -> bool:
    return min_score is None or rollout.score >= min_score


def _ranked(rollouts: Sequence[DumpedRollout]) -> list[list[DumpedRollout]]:
    """Groups the rollouts by prompt, each group sorted from best to worst."""
    groups: dict[tuple[str, str, str], list[DumpedRollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.prompt].append(rollout)
    return [sorted(group, key=lambda rollout: -rollout.score) for group in groups.values()]
