"""Why is my loss zero? Finds what removed the learning signal from a step, with example rollouts, and a run's problems.

Invariant: pure functions of index rows and metrics. A cause without data is left out. Dropped rollouts are not in a dump, so
the share of infrastructure failures comes from the metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.checks.step_warnings import ALLOW, LENGTH, MEND, RAISE_TURN, SHOW, TRY_REWARD, Problem, find_problems
from etude.trajectory import StopReason
from etude.viewer.index import group_rows
from etude.viewer.rows import Row, is_number, numbers_of

_EXAMPLES = 3
_NEARLY_ALL = 0.9
_MOST, _MANY = 0.8, 8  # a share of some rollouts that speaks for all, and how many these must be


@dataclass(frozen=True)
class Cause:
    """A cause that affects `count` of `total` groups or rollouts, and what to do about it; `examples` are some of them, a
    group by its first. It `is_broken` if nothing can be learned before it is mended, and `follows` from others, if any."""

    what: str
    share: float
    count: int | None
    total: int | None
    examples: tuple[Row, ...]
    by_group: bool = False
    fix: str = ""
    is_broken: bool = False
    follows: bool = False

    @property
    def text(self) -> str:
        """The share as text, such as `75 % (6 of 8)`."""
        share = f"{100 * self.share:.0f}\N{NO-BREAK SPACE}%"
        return share if self.count is None else f"{share} ({self.count} of {self.total})"

    @property
    def named_examples(self) -> list[tuple[str, Row]]:
        """The examples with their names: a prompt's uid, or a rollout's request id."""
        return [(row.uid if self.by_group else row.request_id or row.uid, row) for row in self.examples]


_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
_UNSAID = Problem("", "")


def find_causes(
    rows: Sequence[Row],
    metrics: Mapping[str, Any],
    evidence: Mapping[str, Problem],
    scorer: str,
    has_tools: bool = False,
    copied: Collection[str] = (),
    always: tuple[int, float] | None = None,
) -> Iterator[Cause]:
    """Finds the causes in the `rows`, the `metrics` and the `evidence` (see `find_evidence`) of one step, what others come
    of first; `scorer` names the reward function, and the run `has_tools`, whether they were called or not. `copied`: rows,
    by place, whose answer is what a tool said last; `always`: since which step each answer has earned what, see
    `always_paid`."""
    if always is not None:
        what = (
            f"rollouts earned {always[1]:.3g}, as all since step {always[0]} (does the reward pay whatever the answer?)"
        )
        yield _cause(what, rows, len(rows), TRY_REWARD.format(scorer=scorer))
    called, unread = [row for row in rows if row.calls], [row for row in rows if "unread" in row.flags]
    malformed = [row for row in rows if "malformed" in row.flags and "unread" not in row.flags]
    if called:
        readable = sum(not {"malformed", "lost_call"} & {*row.flags} or "unread" in row.flags for row in called)
        yield from _call_causes(rows, called, readable, evidence, scorer, copied)
    what = "rollouts with a tool call in a format that multi_turn.format does not read"
    fix = evidence.get("rollout/unread_calls", _UNSAID).fix or f"set {_MULTI_TURN}.format to that of the model's calls"
    yield _cause(what, unread, len(rows), fix, is_broken=10 * len(unread) >= len(rows))
    if called or has_tools:
        idle = [row for row in rows if not row.calls and "unread" not in row.flags]
        unpaid = sum((row.score or 0.0) <= 0 for row in idle)
        fix = f"say in the prompt when to call; {SHOW}; `etude check` tells whether an example there is read"
        broken = unpaid >= max(_NEARLY_ALL * len(rows), 1)
        yield _cause("rollouts without a tool call", idle, len(rows), fix, is_broken=broken)
    said = evidence.get("rollout/malformed_calls", _UNSAID).what.lstrip(", ")
    yield _cause("rollouts with a malformed tool call", malformed, len(rows), f"{SHOW}; {said}".rstrip("; "))
    if read := [row for row in rows if row.found_answer is not None]:
        missed = [row for row in read if not row.found_answer]
        fix = f"tell the model in the prompt the form that {scorer} reads"
        yield _cause("answers that the scorer did not find", missed, len(read), fix)
    no_room = StopReason.TOOL_RESPONSE_OVERFLOW.value
    full = [row for row in rows if row.stop_reason == no_room]
    broken = _earn_nothing(full) and len(full) >= _NEARLY_ALL * (len(called) or len(rows))
    what = "rollouts that had no room for what a tool or environment said"
    yield _cause(what, full, len(rows), f"raise {LENGTH}", is_broken=broken)
    cut = [row for row in rows if "truncated" in row.flags and row.stop_reason != no_room]
    fix = evidence.get(StopReason.RESPONSE_LENGTH.value, _UNSAID).fix
    if 2 * sum(row.stop_reason == StopReason.TURN_LENGTH.value for row in cut) > len(cut):
        fix = RAISE_TURN
    within = sum(bool({"malformed", "lost_call"} & {*row.flags}) for row in cut)
    broken = within >= max(_NEARLY_ALL * len(called), _MANY)  # no call is read to its end
    broken |= _earn_nothing(cut) and len(cut) >= _NEARLY_ALL * len(rows)
    fix = fix or f"see {LENGTH} and rollout.max_model_len"
    yield _cause("rollouts cut for length", cut, len(rows), fix, is_broken=broken)
    if is_number(share := metrics.get("rollout/infrastructure_failure_share")):
        retried = tuple(row for row in rows if "retried" in row.flags)[:_EXAMPLES]
        what, fix = "rollouts that met an infrastructure failure", "the run's log names the service or tool"
        yield Cause(what, float(share), None, None, retried, fix=fix)
    scored = [row for row in rows if row.score is not None]
    paid = {row.rewards.get("score", row.score or 0.0) for row in scored}
    if scored and len(paid) == 1 and max(paid) <= 0:
        fix = f"`etude check` tells whether a right answer earns something: if not, mend {scorer}; if so, the rows are too "
        fix += f"hard: take easier ones, {SHOW}"
        by_others = f" from {scorer}" if not _earn_nothing(scored) else ""  # tools or an environment paid
        yield _cause(f"rollouts earned nothing{by_others}", scored, len(scored), fix, is_broken=True, follows=True)
    if compared := [group for group in group_rows(scored).values() if len(group) > 1]:
        equal = [group[0] for group in compared if len({round(row.score or 0.0, 9) for row in group}) == 1]
        most = max(row.score or 0.0 for group in compared for row in group)
        solved = sum((row.score or 0.0) >= most > 0 for row in equal)
        what = "groups whose rewards are all equal"
        what += f", {solved} of them the highest of the step: most likely solved" if solved and always is None else ""
        easy = 2 * solved > len(equal) and always is None
        fix = f"take {'harder' if easy else 'easier'} rows"
        fix += ", or more answers to each (actor_rollout_ref.rollout.n); temperature 1 makes them differ"
        yield _cause(what, equal, len(compared), fix, by_group=True, follows=not easy)


def _call_causes(
    rows: Sequence[Row],
    called: Sequence[Row],
    readable: int,
    evidence: Mapping[str, Problem],
    scorer: str,
    copied: Collection[str],
) -> Iterator[Cause]:
    """What is wrong with the rollouts that `called` a tool, so many of them `readable`: calls, turns or answers."""
    failed = [row for row in rows if row.call_errors and not {"malformed", "lost_call", "unread"} & {*row.flags}]
    told = {kind.partition("/")[2]: problem for kind, problem in evidence.items() if kind.startswith("tool/")}
    do = " or ".join(dict.fromkeys(problem.fix for problem in told.values())) or f"{MEND}, or {ALLOW}"
    said = "".join(f"; {name}{problem.what}" for name, problem in told.items())
    fix = f"{do} ({_MULTI_TURN}.tool_config_path){said}"
    broken = len(failed) >= _NEARLY_ALL * readable and 10 * len(failed) >= len(rows)
    yield _cause(
        "rollouts whose calls were all read, and in which one failed", failed, len(rows), fix, is_broken=broken
    )
    late = StopReason.MAX_ASSISTANT_TURNS.value
    last = [row for row in called if row.stop_reason == late and not (row.score or 0.0) > 0]
    broken = len(last) >= max(_NEARLY_ALL * readable, _MANY)
    fix = f"raise {_MULTI_TURN}.max_assistant_turns: one turn calls, the next one answers"
    what = "rollouts that ended before they could say what the tool said"
    yield _cause(what, last, len(rows), fix, is_broken=broken)
    fine = [row for row in called if not (row.call_errors or row.flags)]  # what was cut for length is another cause
    wrong = [row for row in fine if not (row.score or 0.0) > 0 and row.stop_reason != late]
    fix = "read these: the arguments were wrong, or what was made of the tool's answer; show one worked example of "
    fix += "each kind of question, or let the tool refuse what was not asked for"
    same = [row for row in wrong if row.place in copied]
    if 2 * len(same) > len(wrong):  # the tool is right, or the ground truth
        fix = f"{len(same)} of these {len(wrong)} answer what the tool said: where that is right, the ground truth in "
        fix += f"data.train_files is wrong, or {scorer} reads something else; where it is not, the call's arguments are"
        wrong = [*same, *(row for row in wrong if row.place not in copied)]
    broken = len(same) >= _NEARLY_ALL * len(rows) or (len(wrong) >= _MOST * len(fine) and len(same) >= _MANY)
    what = "rollouts whose calls were answered, and whose answer earned nothing"
    yield _cause(what, wrong, len(rows), fix, is_broken=broken)


def _earn_nothing(rows: Sequence[Row]) -> bool:
    return bool(rows) and not any((row.score or 0.0) > 0 for row in rows)


def _cause(
    what: str,
    affected: Sequence[Row],
    total: int,
    fix: str,
    *,
    by_group: bool = False,
    is_broken: bool = False,
    follows: bool = False,
) -> Cause:
    examples, share = tuple(affected[:_EXAMPLES]), len(affected) / max(total, 1)
    return Cause(what, share, len(affected), total, examples, by_group, fix, is_broken, follows)


def count_problems(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Summarizes each kind of problem in a run's metrics, the validation before its first step included: the number of
    affected steps, and the last, without what to do, which the rollouts of a step decide (`find_evidence`)."""
    records = [record for record in records if isinstance(record.get("step"), int)]
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for record in records:
        for kind, problem in find_problems(numbers_of(record)).items():
            found[kind].append((record["step"], problem.what))
    trained = sum(record["step"] > 0 for record in records)
    return [
        f"in {len(of)} of {trained + (of[0][0] == 0)} steps, last in step {of[-1][0]}: {of[-1][1]}"
        for of in found.values()
    ]
