"""Why is my loss zero? What took the signal to learn from out of a run's last step, with rollouts to look at.

Invariant: computed from files alone, the last dump and the last metrics; a cause without data is left out. A dump lacks the
rollouts that were dropped, so that the share of failures is the metric's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from etude.dumps import list_dump_steps, read_rollouts
from etude.problems import find_problems
from etude.trajectory import TRUNCATED
from etude.viewer.panel import is_number
from etude.viewer.rows import as_dict

MAX_SCANNED = 20_000
_EXAMPLES = 3
_READ = ("uid", "request_id", "score", "stop_reason", "attempt", "rewards")


@dataclass(frozen=True)
class Cause:
    """`count` of `total` things (`what`); `examples` are uids of prompts, or request ids of rollouts, in `folder/step`."""

    what: str
    share: float
    count: int | None
    total: int | None
    examples: tuple[str, ...]

    @property
    def text(self) -> str:
        """`75 % (6 of 8)`."""
        share = f"{100 * self.share:.0f}\N{NO-BREAK SPACE}%"
        return share if self.count is None else f"{share} ({self.count} of {self.total})"


def find_causes(folder: Path, metrics: Mapping[str, Any], step: int | None = None) -> list[Cause]:
    """The causes in a step's dump of `folder`, by default the last one, and that step's `metrics`.

    Raises:
        DataError: the dump cannot be read; names file and line.
    """
    steps = list_dump_steps(folder) if step is None else [step]
    found = islice(read_rollouts(folder / f"{steps[-1]}.jsonl"), MAX_SCANNED) if steps else ()
    records = [
        {name: record.get(name) for name in _READ} for record in found
    ]  # a step's texts and tokens are gigabytes
    groups: dict[str, set[float]] = defaultdict(set)
    sizes: dict[str, int] = defaultdict(int)
    for record in records:
        if record["uid"] is not None and is_number(score := record["score"]):
            groups[str(record["uid"])].add(round(float(score), 9))
            sizes[str(record["uid"])] += 1
    compared = [uid for uid, size in sizes.items() if size > 1]
    read = [
        (record, info["pred"])
        for record in records
        if "pred" in (info := as_dict(as_dict(record["rewards"]).get("score_info")))
    ]
    cut = [record for record in records if record.get("stop_reason") in TRUNCATED]
    retried = [record for record in records if record.get("attempt")]
    failed = metrics.get("rollout/infrastructure_failure_share")
    return [
        *_cause("groups whose rewards are all equal", compared, [uid for uid in compared if len(groups[uid]) == 1]),
        *_cause(
            "answers that the scorer did not find", read, _ids(record for record, answer in read if answer is None)
        ),
        *_cause("rollouts cut for length", records, _ids(cut)),
        *([] if failed is None else [_failures(float(failed), _ids(retried))]),
    ]


def _cause(what: str, all_of: list[Any], found: list[str]) -> list[Cause]:
    if not all_of:
        return []
    return [Cause(what, len(found) / len(all_of), len(found), len(all_of), tuple(found[:_EXAMPLES]))]


def _failures(share: float, examples: list[str]) -> Cause:
    return Cause("rollouts that met an infrastructure failure", share, None, None, tuple(examples[:_EXAMPLES]))


def _ids(records: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(record.get("request_id") or record.get("uid")) for record in records]


def count_problems(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each kind of problem that a run's metrics show, with its number of steps and the last step's message."""
    steps = [record for record in records if isinstance(record.get("step"), int) and record["step"] > 0]
    last: dict[str, tuple[str, int]] = {}
    count: Counter[str] = Counter()
    for record in steps:
        numbers = {name: float(value) for name, value in record.items() if is_number(value)}
        for kind, sentence in find_problems(numbers).items():
            last[kind] = sentence, record["step"]
            count[kind] += 1
    return [
        f"in {count[kind]} of {len(steps)} steps, last in step {step}: {sentence}"
        for kind, (sentence, step) in last.items()
    ]
