"""What training changed: results before and after, and which trajectories show it.

Invariant: trajectories are chosen from a folder's first and last step by file order; only `change` and `failures` look at
scores. A malformed `summary.json` raises an error that names it.

`summary.json`, which `etude.quickstart.stages` writes, is an object: `before` and `after` map a quantity's name to a
number, or for a proportion to `{"value", "low", "high"}` (a 95 % interval); other scalars are listed as facts. Without it,
the first and the last validation are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from etude.errors import DataError, one_line
from etude.run_folder import SUMMARY_FILE
from etude.trajectory import StopReason
from etude.viewer.curves import Records, validation_keys, validation_label
from etude.viewer.rows import Row, is_number

MAX_FACTS = 30
MAX_HEADLINES = 6
_SHOWN = 3

Estimate = dict[str, float]
"""A number as `value`; with `low` and `high`, a proportion and its 95 % interval."""


def read_headlines(folder: Path, records: Records) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns the results as `{name, before, after}` (an `Estimate` or None), and the summary's other facts.

    Raises:
        DataError: the summary is malformed.
    """
    path = folder / SUMMARY_FILE
    summary = _read_summary(path)
    sides = {side: summary.get(side, {}) for side in ("before", "after")}
    for side, values in sides.items():
        if not isinstance(values, dict):
            raise DataError(f"{path}: '{side}' must map names to numbers")
        sides[side] = {name: _estimate(value, f"{path}: {side}.{name}") for name, value in values.items()}
    names = dict.fromkeys(chain(*sides.values()))
    found = [{"name": name[:200], **{side: values.get(name) for side, values in sides.items()}} for name in names]
    return (found or _compare_validations(records))[:MAX_HEADLINES], _facts(summary)


def _read_summary(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({one_line(error, 120)})") from error
    if not isinstance(summary, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(summary).__name__}")
    return summary


def _estimate(value: object, where: str) -> Estimate:
    given = {"value": value} if is_number(value) else value
    if isinstance(given, Mapping) and is_number(given.get("value")):
        bounds = {name: float(given[name]) for name in ("low", "high") if is_number(given.get(name))}
        return {"value": float(given["value"])} | (bounds if len(bounds) == 2 else {})
    raise DataError(f"{where} must be a number or an object with 'value' (and 'low', 'high')")


def _compare_validations(records: Records) -> list[dict[str, Any]]:
    headlines = []
    for key in validation_keys(records):
        having = [record for record in records if is_number(record.get(key))]
        if len(having) > 1:
            names = {"value": key, "low": f"{key}/ci95_low", "high": f"{key}/ci95_high"}
            first, last = ({name: each.get(of) for name, of in names.items()} for each in (having[0], having[-1]))
            name = f"validation: {validation_label(key)}"
            headlines.append({"name": name, "before": _estimate(first, key), "after": _estimate(last, key)})
    return headlines


def _facts(summary: Mapping[str, Any]) -> dict[str, str]:
    """The summary's scalars as text, except those ending in _before or _after, which are already headlines."""
    plain = [
        (name.replace("_", " ")[:80], f"{value:,.4g}" if isinstance(value, float) else str(value)[:300])
        for name, value in summary.items()
        if isinstance(value, (str, int, float)) and not name.endswith(("_before", "_after"))
    ]
    return dict(plain[:MAX_FACTS])


def choose_trajectories(rows: Sequence[Row]) -> dict[str, Any]:
    """Chooses what to read of a run, as places, each from the first split that has it (validation, evaluations, training).

    `change`: the first prompt that is scored higher in the last step, (then, now). `samples`: the first rollout of each of
    the first step's first three prompts and of the same prompt in the last step (if none recurs, of its first three), None
    where there is none. `failures`: the first three of the last step that were cut, met a failed call, or earned nothing.
    """
    by_split: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        by_split.setdefault(row.split, {}).setdefault(row.step, []).append(row)
    order = sorted(by_split, key=lambda split: (split in ("train", ""), split != "validation", split))
    ends = [
        (steps[min(steps)], steps[max(steps)] if len(steps) > 1 else []) for steps in map(by_split.get, order) if steps
    ]
    changes = (_change(first, last) for first, last in ends)
    whole = ("", StopReason.COMPLETED.value)
    failed = (
        [
            row.place
            for row in last or first
            if row.stop_reason not in whole or row.call_errors > 0 or (row.score is not None and row.score <= 0)
        ][:_SHOWN]
        for first, last in ends
    )
    return {
        "change": next(filter(None, changes), None),
        "samples": _samples(*ends[0]) if ends else None,
        "failures": next(filter(None, failed), []),
    }


def _change(first: Sequence[Row], last: Sequence[Row]) -> tuple[str, str] | None:
    again = _by_prompt(last)
    for before in first:
        after = again.get(before.prompt)
        if after is not None and (before.score or 0.0) < (after.score or 0.0):
            return before.place, after.place
    return None


def _samples(first: Sequence[Row], last: Sequence[Row]) -> dict[str, Any]:
    before, again = [*_by_prompt(first).values()][:_SHOWN], _by_prompt(last)
    after: list[Row | None] = [again.get(row.prompt) for row in before]
    if not any(after):
        after = [*[*again.values()][:_SHOWN], *[None] * _SHOWN]
    return {
        "pairs": [[row.place, other and other.place] for row, other in zip(before, after)],
        "files": [first[0].name, *([last[0].name] if last else [])],
    }


def _by_prompt(rows: Sequence[Row]) -> dict[str, Row]:
    """Prompt → its first rollout."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row.prompt, row)
    return found
