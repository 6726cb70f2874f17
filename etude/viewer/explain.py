"""Lists a dumped trajectory token by token, and verifies that it is exactly what the policy saw and sampled.

Invariant: checks compare token ids, never text. A check passes, fails with the first wrong position, or says why it was
skipped. Torch is imported only to recompute log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.dumps import sequences_of, token_values, trajectory_from_record
from etude.errors import DataError
from etude.trajectory import GRAMMAR, Provenance, Rollout, Trajectory
from etude.viewer.index import RolloutIndex
from etude.viewer.rows import is_number

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-4  # nats; float32 forward passes with different batch shapes differ by far less


class Verdict(str, Enum):
    """Outcome of a check."""

    HOLDS = "holds"
    FAILS = "fails"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    """A statement about a trajectory, its verdict, and the evidence as text."""

    statement: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Token:
    """One response token. `log_prob` and `version` (of the weights) are None unless the policy sampled it. `values` are the
    trainer's per-token values by name (`etude.dumps.TOKEN_VALUES`), if the dump has them."""

    position: int
    id: int
    text: str
    provenance: Provenance
    turn: int
    log_prob: float | None
    version: int | None
    reward: float
    values: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def mask(self) -> int:
        """1 if the token is trained on, else 0."""
        return int(self.provenance is Provenance.SAMPLED)


def read_row(path: Path, row: int) -> dict[str, Any]:
    """Reads rollout number `row` (from 0) of a dump file.

    Raises:
        DataError: there is no such rollout, or the file cannot be read; names the file.
    """
    index = RolloutIndex(path)
    index.refresh()
    if row < len(index.rows):
        return index.read(index.rows[row])
    known = f"its rows are numbered from 0 to {len(index.rows) - 1}" if index.rows else "it holds no trajectory"
    bad = f" ({index.bad[0].place}: {index.bad[0].reason})" if index.bad else ""
    raise DataError(f"{path} has no row {row}; {known}{bad}")


def list_tokens(
    record: Mapping[str, Any],
    decode: Callable[[list[int]], str] | None = None,
    sequences: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Token]:
    """Yields the response tokens, each with its text by `decode`; without one, a segment's text is at its first token."""
    trajectory = trajectory_from_record(record)
    of_rollout = [trajectory if each is record else trajectory_from_record(each) for each in sequences or [record]]
    place = next(number for number, each in enumerate(of_rollout) if each is trajectory)
    rewards = Rollout(of_rollout).token_level_scores(*_weights((sequences or [record])[-1]))[place]
    values = token_values({**record, "response_mask": trajectory.response_mask})
    position = 0
    for number, segment in enumerate(trajectory.segments):
        whole = str(record["segments"][number].get("text") or "")
        for i, token in enumerate(segment.token_ids):
            text = decode([token]) if decode is not None else whole if i == 0 else ""
            yield Token(
                position,
                token,
                text,
                segment.provenance,
                segment.turn,
                segment.log_probs[i] if segment.log_probs else None,
                segment.weight_versions[i] if segment.weight_versions else None,
                rewards[position],
                {name: column[position] for name, column in values.items()},
            )
            position += 1


class Weights:
    """The model in a folder, used to recompute log-probs; loaded once, on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def network(self) -> PreTrainedModel:
        """The model in float32 on the CPU, in eval mode.

        Raises:
            ConfigError: it cannot be loaded.
        """
        from etude.models import load_causal_lm

        return load_causal_lm(self.folder, dtype="float32", device="cpu").eval()


def check_sequence(
    record: Mapping[str, Any], model: Path | Weights | None = None, tolerance: float = TOLERANCE
) -> list[Check]:
    """Verifies one sequence; with `model` (the weights that sampled it, or their folder), its log-probs too.

    Rewards are checked only for a rollout's main sequence. See `check_overlap` for the check across sequences.

    Raises:
        DataError: the record lacks parts of a trajectory.
        ConfigError: the model cannot be loaded.
    """
    trajectory = trajectory_from_record(record)
    ids, mask = trajectory.response_ids, trajectory.response_mask
    other_ids = _first_difference("response_ids", ids, record.get("response_ids") or [])
    other_mask = _first_difference("response_mask", mask, record.get("response_mask") or [])
    sampled = f"{sum(mask)} of {len(mask)} tokens sampled"
    return [
        _check("the ids trained on are the ids in the model's context", other_ids, f"{len(ids)} response tokens"),
        _check("the mask is 1 exactly where the policy sampled", other_mask, sampled),
        _log_probs_where_sampled(record, trajectory),
        *([_rewards_add_up(record, trajectory)] if "score" in record else []),
        _log_probs_match(record, trajectory, Weights(model) if isinstance(model, Path) else model, tolerance),
        *([_values_where_sampled(record, trajectory)] if "token_values" in record else []),
    ]


def check_overlap(record: Mapping[str, Any]) -> Check | None:
    """Checks that no token is trained on twice in a rollout with several sequences; None if there is only one.

    Two sequences can share sampled tokens after an identical prefix only if the engine sampled them twice. Ids alone cannot
    prove that, so the check is then skipped and says where.
    """
    sequences = [trajectory_from_record(sequence) for sequence in sequences_of(record)]
    if len(sequences) < 2:
        return None
    statement = "no sampled token is in two sequences"
    for second, one in enumerate(sequences):
        for first, other in enumerate(sequences[:second]):
            if shared := _count_shared_samples(other, one):
                alike = f"sequences {first} and {second} hold the same {shared} sampled tokens after the same ids"
                return Check(statement, Verdict.SKIPPED, f"{alike}: drawn twice, which ids alone cannot prove")
    tokens = sum(sum(sequence.response_mask) for sequence in sequences)
    return Check(statement, Verdict.HOLDS, f"{tokens} sampled tokens in {len(sequences)} sequences")


def _count_shared_samples(one: Trajectory, other: Trajectory) -> int:
    """Number of sampled tokens in the common prefix of two sequences."""
    contexts = [trajectory.prompt_ids + trajectory.response_ids for trajectory in (one, other)]
    masks = [[0] * len(trajectory.prompt_ids) + trajectory.response_mask for trajectory in (one, other)]
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(*contexts))
    return sum(first and second for _, first, second in zip(alike, *masks))


def weight_versions_of(trajectory: Trajectory) -> list[int]:
    """Returns the versions of the weights that sampled the trajectory, sorted."""
    return sorted({version for segment in trajectory.segments for version in segment.weight_versions or ()})


def _weights(record: Mapping[str, Any]) -> tuple[float, float]:
    weights = record.get("reward_weights") or {}
    values = [weights.get(name, 1.0) for name in ("tool", "score")] if isinstance(weights, Mapping) else []
    if not values or not all(map(is_number, values)):
        raise DataError(f"rollout record: 'reward_weights' is malformed: {str(weights)[:100]}")
    return float(values[0]), float(values[1])


def _check(statement: str, wrong: str | None, evidence: str) -> Check:
    return Check(statement, Verdict.HOLDS, evidence) if wrong is None else Check(statement, Verdict.FAILS, wrong)


def _first_difference(name: str, ours: Sequence[Any], theirs: Sequence[Any]) -> str | None:
    if len(ours) != len(theirs):
        return f"{len(ours)} segment tokens, {len(theirs)} in {name}"
    where = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    return None if where is None else f"token {where}: {ours[where]} in the segments, {theirs[where]} in {name}"


def _log_probs_where_sampled(record: Mapping[str, Any], trajectory: Trajectory) -> Check:
    statement = "every sampled token has a log-prob, no other token has one"
    dumped = record.get("response_log_probs")
    wrong = None
    if dumped is not None:
        wrong = _first_difference("response_log_probs", trajectory.response_log_probs, dumped)
    lowest = 0.0
    for number, segment in enumerate(trajectory.segments):
        if (segment.log_probs is not None) != (segment.provenance is Provenance.SAMPLED):
            wrong = wrong or f"segment {number} ({segment.provenance.value}) breaks it"
        for value in segment.log_probs or ():
            if not (math.isfinite(value) and value <= 1e-6):
                wrong = wrong or f"segment {number} holds {value}, which is not a log-prob"
            lowest = min(lowest, value)
    return _check(statement, wrong, f"the least likely: {lowest:.3f} nats")


def _values_where_sampled(record: Mapping[str, Any], trajectory: Trajectory) -> Check:
    columns = record["token_values"] if isinstance(record["token_values"], Mapping) else {"": None}
    mask = trajectory.response_mask
    wrong = None
    for name, column in columns.items():
        if not isinstance(column, list):
            wrong = wrong or f"token_values.{name} is no list"
        elif len(column) != len(mask):
            wrong = wrong or f"{len(mask)} segment tokens, {len(column)} in token_values.{name}"
        elif any(value is not None and not sampled for value, sampled in zip(column, mask)):
            wrong = wrong or f"token_values.{name} has a value for a token that was not sampled"
    return _check("the trainer's values are those of sampled tokens", wrong, ", ".join(columns))


def _rewards_add_up(record: Mapping[str, Any], trajectory: Trajectory) -> Check:
    statement = "the rewards on the tokens add up to the score"
    score = record.get("score")
    if not isinstance(score, (int, float)):
        return Check(statement, Verdict.SKIPPED, "the record holds no score")
    total = math.fsum(trajectory.token_level_scores(*_weights(record)))
    wrong = None if abs(total - score) <= 1e-6 * max(1.0, abs(score)) else f"{total:g} on tokens, score {score:g}"
    return _check(statement, wrong, f"{score:g}")


def _log_probs_match(
    record: Mapping[str, Any], trajectory: Trajectory, model: Weights | None, tolerance: float
) -> Check:
    statement = "a full forward pass gives the engine's log-probs"
    versions = ", ".join(map(str, weight_versions_of(trajectory))) or "unknown"
    if model is None:
        return Check(statement, Verdict.SKIPPED, f"sampled by weights {versions}: name their folder with --model")
    if not any(trajectory.response_mask):
        return Check(statement, Verdict.SKIPPED, "nothing was sampled")
    if images := record.get("images"):
        return Check(statement, Verdict.SKIPPED, f"it saw {len(images)} images, and a dump holds no pixels")
    runs = [(bool(each.get(GRAMMAR)), len(each["token_ids"])) for each in record["segments"]]
    narrowed = [flag for flag, length in runs for _ in range(length)]
    if all(flag or not sampled for flag, sampled in zip(narrowed, trajectory.response_mask)):
        return Check(statement, Verdict.SKIPPED, "sampled under a grammar, and a dump does not say what it left")
    difference, where = largest_difference(trajectory, record.get("sampling") or {}, model, narrowed)
    evidence = f"largest difference {difference:.1e} nats at token {where} (weights {versions}, {model.folder})"
    if any(narrowed):
        evidence += ", but for those under a grammar"
    if difference <= tolerance:
        return Check(statement, Verdict.HOLDS, f"{evidence}, tolerance {tolerance:g}")
    hint = f"does the folder hold weights {versions}? A checkpoint holds those that its step ended with"
    return Check(statement, Verdict.FAILS, f"{evidence}, tolerance {tolerance:g}; {hint}")


def largest_difference(
    trajectory: Trajectory, sampling: Mapping[str, Any], model: Weights, narrowed: Sequence[bool]
) -> tuple[float, int]:
    """Returns (max |engine log-prob - log-prob of a float32 forward pass|, its response position), without the `narrowed`
    tokens, which a grammar chose among.

    Log-probs are of the distribution that was sampled from, after the temperature, top-k and top-p in `sampling`.
    """
    import torch

    from etude.inference import SamplingParams
    from etude.inference.sampling import restrict

    params = SamplingParams(**{k: sampling[k] for k in ("temperature", "top_p", "top_k") if k in sampling})
    network = model.network
    ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
    largest, size = int(ids.max()), network.get_input_embeddings().weight.shape[0]
    if largest >= size or int(ids.min()) < 0:
        raise DataError(f"the trajectory holds token {largest}, but {model.folder} has {size}: it is another model's")
    with torch.no_grad():
        logits = network(input_ids=ids).logits[0, len(trajectory.prompt_ids) - 1 : -1].float()
    if params.temperature == 0:
        again = torch.where(logits.argmax(-1) == ids[0, len(trajectory.prompt_ids) :], 0.0, -math.inf)
    else:
        scaled = restrict(logits / params.temperature, [params] * len(logits))
        again = scaled.log_softmax(-1).gather(1, ids[0, len(trajectory.prompt_ids) :, None]).squeeze(1)
    engine = torch.tensor(trajectory.response_log_probs)
    sampled = torch.tensor(trajectory.response_mask, dtype=torch.bool) & ~torch.tensor(narrowed, dtype=torch.bool)
    difference = torch.where(sampled, (engine - again).abs().nan_to_num(math.inf), 0.0)
    where = int(difference.argmax())
    return float(difference[where]), where
