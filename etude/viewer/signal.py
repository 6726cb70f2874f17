"""Why is my loss zero? Finds what removed the learning signal from a run's last step, with example rollouts.

Invariant: computed from files only: the last dump and the last metrics. A cause without data is left out. Dropped rollouts
are not in the dump, so the share of infrastructure failures comes from the metrics.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from etude.checks.steps import find_problems
from etude.dumps import list_dump_steps, readable_rollouts
from etude.trajectory import TRUNCATED
from etude.viewer.panel import is_number
from etude.viewer.rows import as_dict

MAX_SCANNED = 20_000
_EXAMPLES = 3
_READ = ("uid", "request_id", "score", "stop_reason", "attempt", "rewards")


@dataclass(frozen=True)
class Cause:
    """A cause that affects `count` of `total` groups or rollouts; `examples` are prompt uids or rollout request ids."""

    what: str
    share: float
    count: int | None
    total: int | None
    examples: tuple[str, ...]

    @property
    def text(self) -> str:
        """The share as text, such as `75 % (6 of 8)`."""
        share = f"{100 * self.share:.0f}\N{NO-BREAK SPACE}%"
        return share if self.count is None else f"{share} ({self.count} of {self.total})"


def find_causes(folder: Path, metrics: Mapping[str, Any], step: int | None = None) -> list[Cause]:
    """Finds the causes in the dump of `step` in `folder` (default: the last one) and in that step's `metrics`.

    Raises:
        DataError: the dump cannot be read; names file and line.
    """
    steps = list_dump_steps(folder) if step is None else [step]
    found = islice(readable_rollouts(folder / f"{steps[-1]}.jsonl"), MAX_SCANNED) if steps else ()
    records = [
        {name: record.get(name) for name in _READ} for record in found
    ]  # not the full records: a step's texts and tokens are gigabytes
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


def _cause(what: str, all_of: list[Any], affected: list[str]) -> list[Cause]:
    if not all_of:
        return []
    return [Cause(what, len(affected) / len(all_of), len(affected), len(all_of), tuple(affected[:_EXAMPLES]))]


def _failures(share: float, examples: list[str]) -> Cause:
    return Cause("rollouts that met an infrastructure failure", share, None, None, tuple(examples[:_EXAMPLES]))


def _ids(records: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(record.get("request_id") or record.get("uid")) for record in records]


def count_problems(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Summarizes each kind of problem in a run's metrics: the number of affected steps, and the last message."""
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
