"""Why is my loss zero? Finds what removed the learning signal from a step, with example rollouts, and a run's problems.

Invariant: pure functions of index rows and metrics. A cause without data is left out. Dropped rollouts are not in a dump, so
the share of infrastructure failures comes from the metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.checks.step_warnings import find_problems
from etude.viewer.index import group_rows
from etude.viewer.rows import Row, is_number

_EXAMPLES = 3


@dataclass(frozen=True)
class Cause:
    """A cause that affects `count` of `total` groups or rollouts; `examples` are some of them, a group by its first."""

    what: str
    share: float
    count: int | None
    total: int | None
    examples: tuple[Row, ...]
    by_group: bool = False

    @property
    def text(self) -> str:
        """The share as text, such as `75 % (6 of 8)`."""
        share = f"{100 * self.share:.0f}\N{NO-BREAK SPACE}%"
        return share if self.count is None else f"{share} ({self.count} of {self.total})"

    @property
    def named_examples(self) -> list[tuple[str, Row]]:
        """The examples with their names: a prompt's uid, or a rollout's request id."""
        return [(row.uid if self.by_group else row.request_id or row.uid, row) for row in self.examples]


def find_causes(rows: Sequence[Row], metrics: Mapping[str, Any]) -> Iterator[Cause]:
    """Finds the causes in the `rows` and the `metrics` of one step."""
    scored = group_rows(row for row in rows if row.score is not None).values()
    compared = [group for group in scored if len(group) > 1]
    if compared:
        equal = [group[0] for group in compared if len({round(row.score or 0.0, 9) for row in group}) == 1]
        most = max(row.score or 0.0 for group in compared for row in group)
        solved = sum((row.score or 0.0) >= most > 0 for row in equal)
        what = "groups whose rewards are all equal"
        what += f", {solved} of them the highest of the step: most likely solved" if solved else ""
        yield _cause(what, equal, len(compared), by_group=True)
    if read := [row for row in rows if row.found_answer is not None]:
        missed = [row for row in read if not row.found_answer]
        yield _cause("answers that the scorer did not find", missed, len(read))
    if any(row.calls for row in rows):
        yield _cause("rollouts without a tool call", [row for row in rows if not row.calls], len(rows))
        yield _cause("rollouts in which a tool call failed", [row for row in rows if row.call_errors], len(rows))
    if unread := [row for row in rows if "unread" in row.flags]:
        yield _cause("rollouts with a tool call in a format that multi_turn.format does not read", unread, len(rows))
    if rows:
        yield _cause("rollouts cut for length", [row for row in rows if "truncated" in row.flags], len(rows))
    if is_number(share := metrics.get("rollout/infrastructure_failure_share")):
        retried = tuple(row for row in rows if "retried" in row.flags)[:_EXAMPLES]
        yield Cause("rollouts that met an infrastructure failure", float(share), None, None, retried)


def _cause(what: str, affected: Sequence[Row], total: int, by_group: bool = False) -> Cause:
    return Cause(what, len(affected) / total, len(affected), total, tuple(affected[:_EXAMPLES]), by_group)


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
