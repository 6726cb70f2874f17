"""Rescores dumped trajectories and compares the scores: what a changed reward would have given the same answers.

Invariant: a scorer gets the same input as in training, up to special tokens if no tokenizer is available: the sampled
segments of the dump, the row's ground truth and `extra_info`, and the trajectory. Only the reward manager's score is
compared; tool rewards stay as they were. A scorer that fails yields no score, as in training.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, islice
from typing import Any

from etude.dumps import trajectory_from_record
from etude.errors import ConfigError, InfrastructureError, one_line
from etude.rewards.default import Scorer, score_row
from etude.rewards.manager import SCORER_SECONDS, BoundedScorer, ScoreText, read_result
from etude.rewards.scoring import scored_extra_info
from etude.rewards.user_functions import describe_scorer
from etude.rewards.view import TrajectoryView, opening_of
from etude.timeouts import gather
from etude.trajectory import Provenance, Trajectory, plain_numbers

AT_ONCE = 64
_SPECIAL = re.compile(r"<\|[^<>|\s]{1,64}\|>|<｜[^<>｜]{1,64}｜>|</?s>|<(?:bos|eos|pad|unk|start_of_turn|end_of_turn)>")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Rescored:
    """One trajectory's old and new score. `was_right` and `is_right`: from `acc`, or without it a score of 1 or more, or,
    where no manager scored, a total of 1 or more; `error` says why there is no new score."""

    uid: str
    index: Any
    data_source: str
    old: float | None
    new: float | None
    was_right: bool
    is_right: bool
    details: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    error: str = ""

    @property
    def changed(self) -> bool:
        """Whether both scores exist and differ."""
        return self.old is not None and self.new is not None and abs(self.old - self.new) > 1e-9


def solution_text(
    trajectory: Trajectory,
    texts: Sequence[str | None],
    score_text: ScoreText = "assistant",
    decode: Decode | None = None,
) -> str:
    """Returns what a reward manager passes as `solution_str`. `texts`: those of the segments, with special tokens, which
    are stripped by pattern; `decode` (special tokens skipped) is exact.

    Raises:
        ConfigError: a segment has no text, and there is no `decode`.
    """
    pieces = list(zip(trajectory.segments, texts))
    if score_text == "full":
        turns = [pieces]
    else:
        runs = groupby(pieces, key=lambda piece: piece[0].provenance is Provenance.SAMPLED)
        turns = [list(run) for sampled, run in runs if sampled]
        turns = turns[-1:] if score_text == "final_turn" else turns
    return "\n".join(_text_of(turn, decode) for turn in turns)


def _text_of(turn: Sequence[tuple[Any, str | None]], decode: Decode | None) -> str:
    if decode is not None:
        return decode([token for segment, _ in turn for token in segment.token_ids])
    if any(text is None for _, text in turn):
        raise ConfigError(
            "the dump holds token ids without their text: name the model's folder, whose tokenizer decodes them"
        )
    return _SPECIAL.sub("", "".join(text or "" for _, text in turn))


def rescore(
    records: Iterable[Mapping[str, Any]],
    scorer: Scorer | None = None,
    *,
    timeout: float = SCORER_SECONDS,
    score_text: ScoreText = "assistant",
    decode: Decode | None = None,
) -> Iterator[Rescored]:
    """Rescores the records of a dump in order, `AT_ONCE` concurrently. `scorer`: None for the built-in ones.

    Raises:
        ConfigError: no scorer exists for a record's data source, or another error that the user must fix.
        DataError: a record is malformed.
    """
    bounded, rest = BoundedScorer(scorer or score_row, timeout), iter(records)
    while part := list(islice(rest, AT_ONCE)):
        yield from asyncio.run(gather(_score(record, bounded, score_text, decode) for record in part))


async def _score(
    record: Mapping[str, Any], scorer: BoundedScorer, score_text: ScoreText, decode: Decode | None
) -> Rescored:
    trajectory = trajectory_from_record(record)
    text = solution_text(trajectory, [each.get("text") for each in record["segments"]], score_text, decode)
    source, old = str(record.get("data_source")), trajectory.rewards.score
    head: dict[str, Any] = {
        "uid": str(record.get("uid")),
        "index": record.get("index"),
        "data_source": source,
        "old": old,
        "was_right": _is_right(record.get("score") if old is None else old, trajectory.rewards.score_info),
        "text": text,
    }
    try:
        result = await scorer(
            data_source=record.get("data_source"),
            solution_str=text,
            ground_truth=record.get("gts"),
            extra_info=scored_extra_info(trajectory, record),
            trajectory=replace(TrajectoryView.of(trajectory), opened=opening_of(str(record.get("input") or ""))),
        )
        found = read_result(result, describe_scorer(scorer.scorer, source))
    except InfrastructureError as error:
        return Rescored(**head, new=None, is_right=False, error=one_line(error))
    new, details = found["reward_score"], plain_numbers(found["reward_extra_info"])
    return Rescored(**head, new=new, is_right=_is_right(new, details), details=details)


def _is_right(score: float | None, details: Mapping[str, Any]) -> bool:
    acc = details.get("acc")
    return bool(acc >= 1 if isinstance(acc, bool | int | float) else score is not None and score >= 1)


def compare(rescored: Iterable[Rescored], examples: int = 5) -> dict[str, Any]:
    """Returns the comparison as JSON: counts, means over rows with both scores, the confusion of right and wrong, and
    the first `examples` rows that changed or failed."""
    rows = changed = failed = unscored = both = 0
    old_sum = new_sum = 0.0
    words = {True: "right", False: "wrong"}
    confusion = {f"{was}->{now}": 0 for was in words.values() for now in words.values()}
    shown: list[dict[str, Any]] = []
    started = time.monotonic()
    for each in rescored:
        rows += 1
        changed += each.changed
        failed += bool(each.error)
        unscored += each.old is None
        if each.old is not None and each.new is not None:
            both += 1
            old_sum, new_sum = old_sum + each.old, new_sum + each.new
        if not each.error:
            confusion[f"{words[each.was_right]}->{words[each.is_right]}"] += 1
        if (each.changed or each.error) and len(shown) < examples:
            shown.append(asdict(each) | {"text": each.text[-400:]})
    return {
        "rows": rows,
        "changed": changed,
        "failed": failed,
        "without_old_score": unscored,
        "old_mean": old_sum / both if both else None,
        "new_mean": new_sum / both if both else None,
        "confusion": confusion,
        "seconds": round(time.monotonic() - started, 3),
        "examples": shown,
    }
