"""What a run leaves in its folder: the files by name, and how to read them back.

Invariant: reading needs no trainer, and neither a line that a kill cut short nor a file that is not there is an error
where a run may leave one. Dumps of rollouts are `etude.dumps`' part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.errors import DataError, one_line

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
RUN_FILE = "run.json"
COMPLETED = "completed"  # `ended` in `run.json`; null while the run goes on, or after it was killed


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a metrics file, one a step in ascending order; lines of one step are merged, cut lines left out.

    Raises:
        DataError: the file cannot be read.
    """
    steps: dict[int, dict[str, Any]] = {}
    try:
        for _, record in read_steps(Path(path)):
            if record is not None:
                steps.setdefault(record["step"], {}).update(record)
    except OSError as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from error
    return [steps[step] for step in sorted(steps)]


def read_steps(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line of a metrics file with its record, None where the line is not a step's object."""
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            is_step = isinstance(record, dict) and isinstance(record.get("step"), int)
            yield line.rstrip(b"\n") + b"\n", record if is_step else None


def read_run_record(run_dir: Path) -> dict[str, Any]:
    """`run.json`: `versions`, `hardware` and `ended`; empty where there is none that can be read."""
    try:
        record = json.loads((run_dir / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
