"""Rollout dumps as demonstrations: the rollouts worth imitating, in one file that `etude sft` reads.

Invariant: a selected rollout is written as it was dumped, token for token; nothing is re-rendered or re-tokenised. Only its
`uid` changes where runs in several folders gave it to different prompts. The result has the order of the dumps, and does
not depend on how a run's are split into files. Rollouts are read one at a time, twice.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.data.files import Row
from etude.dumps import sequences_of
from etude.errors import DataError
from etude.jsonl import json_line, read_json_lines, write_atomically

Place = tuple[Path, int]
"""A file and a line number in it."""


def choose(records: Iterable[tuple[Place, Row]], min_score: float, per_prompt: int | None) -> dict[Place, str | None]:
    """Selects the rollouts with a score of at least `min_score`, of each prompt the best `per_prompt` different ones
    (ties go to the earlier one), and returns their places, each with a new `uid`, if it needs one.

    Raises:
        DataError: a record is not a rollout; names its place.
    """
    kept: dict[bytes, list[tuple[float, bytes, Place, str]]] = defaultdict(list)
    for place, record in records:
        if "segments" not in record or "prompt_ids" not in record:
            keys = ", ".join(record)
            raise DataError(f"{place[0]}: line {place[1]}: not a rollout of trainer.rollout_data_dir (keys: {keys})")
        score = record.get("score")
        if isinstance(score, int | float) and score >= min_score:
            sequences = sequences_of(record)
            said = _digest([part["token_ids"] for each in sequences for part in each["segments"]])
            kept[_digest(_first_prompt(sequences))].append((-score, said, place, str(record.get("uid"))))
    prompts, folders = defaultdict[str, set[bytes]](set), defaultdict[str, set[Path]](set)
    for prompt, rollouts in kept.items():
        for *_, place, uid in rollouts:
            prompts[uid].add(prompt)
            folders[uid].add(place[0].parent)
    found = dict[Place, str | None]()
    for prompt, rollouts in kept.items():
        different: dict[bytes, tuple[Place, str | None]] = {}
        for _, said, place, uid in sorted(rollouts, key=lambda each: each[0]):
            is_shared = len(prompts[uid]) > 1 and len(folders[uid]) > 1
            different.setdefault(said, (place, f"{uid}-{prompt.hex()[:8]}" if is_shared else None))
        found.update(list(different.values())[:per_prompt])
    return found


def _first_prompt(sequences: Sequence[Mapping[str, Any]]) -> list[int]:
    """The prompt of a rollout: of its first sequence, or of the one that this continues."""
    ids = sequences[0]["prompt_ids"]
    return min(
        (each["prompt_ids"] for each in sequences if ids[: len(each["prompt_ids"])] == each["prompt_ids"]), key=len
    )


def _digest(ids: Any) -> bytes:
    return hashlib.blake2b(json.dumps(ids).encode(), digest_size=16).digest()


def write(
    inputs: Sequence[str | Path], output_dir: str | Path, *, min_score: float, per_prompt: int | None
) -> dict[str, Path]:
    """Writes `traces.jsonl`, from dump files or folders of them; returns its path.

    Raises:
        DataError: a file is not a dump, or no rollout reaches `min_score`.
    """
    files = [file for path in map(Path, inputs) for file in (_dumps_in(path) if path.is_dir() else [path])]
    chosen = choose(
        (((file, line), record) for file in files for line, record in read_json_lines(file)), min_score, per_prompt
    )
    if not chosen:
        raise DataError(f"no rollout in {', '.join(map(str, inputs))} scores {min_score:g} or more")
    path = Path(output_dir).expanduser() / "traces.jsonl"
    with write_atomically(path) as output:
        for file in files:
            for line, record in read_json_lines(file):
                if (file, line) in chosen:
                    uid = chosen[file, line]
                    output.write(json_line(record | {"uid": uid} if uid else record))
    return {"traces": path}


def _dumps_in(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.jsonl"), key=lambda path: (len(path.stem), path.stem))
    if not files:
        raise DataError(f"{folder}: no dumps (*.jsonl) in this folder")
    return files
