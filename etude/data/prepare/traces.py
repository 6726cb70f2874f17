"""Rollout dumps as demonstrations: the rollouts worth imitating, in one file that `etude sft` reads.

Invariant: what is kept is kept as it was dumped, token for token; nothing is rendered or tokenised again. Of a prompt the
best come first, of equal ones the earlier; the result does not depend on how the dumps are split into files.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from etude.data.files import Row
from etude.dumps import read_rollouts
from etude.errors import DataError
from etude.jsonl import json_line, write_atomically


def choose(records: Iterable[tuple[str, Row]], min_score: float, per_prompt: int | None) -> list[Row]:
    """The (place, record) pairs whose score is at least `min_score`, at most `per_prompt` different ones of a prompt.

    Raises:
        DataError: a record is no rollout; names its place.
    """
    kept: dict[str, list[Row]] = defaultdict(list)
    for place, record in records:
        if "segments" not in record or "prompt_ids" not in record:
            raise DataError(f"{place}: not a rollout of trainer.rollout_data_dir (keys: {', '.join(record)})")
        score = record.get("score")
        if isinstance(score, int | float) and score >= min_score:
            kept[json.dumps(record["prompt_ids"])].append(record)
    found = []
    for rollouts in kept.values():
        different: dict[Any, Row] = {}
        for record in sorted(rollouts, key=lambda each: -each["score"]):
            different.setdefault(json.dumps([part["token_ids"] for part in record["segments"]]), record)
        found += list(different.values())[:per_prompt]
    return found


def write(
    inputs: Sequence[str | Path], output_dir: str | Path, *, min_score: float, per_prompt: int | None
) -> dict[str, Path]:
    """Writes `traces.jsonl`, from dump files or folders of them; returns its path.

    Raises:
        DataError: a file is no dump, or nothing is good enough.
    """
    files = [file for path in map(Path, inputs) for file in (_dumps_in(path) if path.is_dir() else [path])]
    places = (
        (f"{file}: record {number}", record) for file in files for number, record in enumerate(read_rollouts(file))
    )
    chosen = choose(places, min_score, per_prompt)
    if not chosen:
        raise DataError(f"no rollout in {', '.join(map(str, inputs))} scores {min_score:g} or more")
    path = Path(output_dir).expanduser() / "traces.jsonl"
    with write_atomically(path) as file:
        for record in chosen:
            file.write(json_line(record))
    return {"traces": path}


def _dumps_in(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.jsonl"), key=lambda path: (len(path.stem), path.stem))
    if not files:
        raise DataError(f"{folder}: no dumps (*.jsonl) in this folder")
    return files
