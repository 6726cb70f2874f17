"""Rollout dumps: one JSON-lines file per step, one trajectory per line.

Invariant: a dump file is either absent or complete (temporary file, then rename), every line is strict JSON that any reader
accepts, and the segments of a trajectory are read back token for token, log-prob for log-prob. A record can be replayed,
re-scored and viewed without the model or its tokenizer. Of images it holds count, sizes and digests, but no pixels.

The trainer decides which trajectories to dump, and decodes their text. Nothing here imports torch, so that viewers start
fast.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from etude.errors import DataError, EtudeError, one_line
from etude.jsonl import JsonValue, json_line, json_safe, read_json_lines, write_atomically
from etude.scratch import free_path
from etude.trajectory import Provenance, Rewards, Segment, StopReason, ToolCallRecord, Trajectory

T = TypeVar("T")

_MIN_IMAGE_BYTES = 64
_DATA_ADDRESS = re.compile(r"data:[\w./+-]*;base64,")


def write_rollouts(folder: Path | str, step: int, records: Iterable[Mapping[str, object]]) -> Path:
    """Writes `records` to `{folder}/{step}.jsonl`, replacing an earlier file of that step, and returns its path.

    Raises:
        EtudeError: the file cannot be written; names it.
    """
    path = Path(folder) / f"{step}.jsonl"
    with write_atomically(path) as file:
        for record in records:
            file.write(json_line(record))
    return path


def read_rollouts(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yields the records of one dump file, one at a time.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object; names file and line.
    """
    return (record for _, record in read_json_lines(path))


def list_dump_steps(folder: Path | str) -> list[int]:
    """The steps with a dump file in `folder`, ascending; empty if the folder does not exist."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isascii() and path.stem.isdigit())


def set_aside_later(folder: Path | str, step: int) -> Path | None:
    """Moves the dumps of later steps than `step` to a new folder beside `folder` (`rollouts.1`, `rollouts.2` …), so that
    those of an earlier run are not read as this one's; returns it, or None if there are none.

    Raises:
        EtudeError: a file cannot be moved; names it.
    """
    folder = Path(folder).resolve()
    later = [f"{each}.jsonl" for each in list_dump_steps(folder) if each > step]
    if not later:
        return None
    aside = free_path(folder)
    try:
        aside.mkdir()
        for name in later:
            (folder / name).rename(aside / name)
    except OSError as error:
        raise EtudeError(f"cannot move dumps of an earlier run from {folder} to {aside}: {one_line(error)}") from error
    return aside


_ROW_KEYS = ("uid", "index", "data_source", "ability", "agent_name", "extra_info", "tools_kwargs", "interaction_kwargs")


def rollout_record(
    trajectory: Trajectory,
    row: Mapping[str, Any],
    *,
    step: int,
    input: str,
    output: str,
    score: float | None,
    reward_weights: Mapping[str, float] | None = None,
    texts: Sequence[str] | None = None,
    earlier: Sequence[Mapping[str, JsonValue]] = (),
    token_values: Mapping[str, Sequence[float | None]] | None = None,
) -> dict[str, JsonValue]:
    """Builds one line of a dump: `Trajectory.to_record()` plus what is needed to re-score it and for humans to read it.

    Args:
        row: the data row (`uid`, `reward_model.ground_truth`, `data_source`, `extra_info` …); its `attempt` is the number of
            infrastructure retries, 0 for the first attempt.
        input, output: decoded prompt and response, with special tokens.
        score: the weighted total reward; None where nobody gave one.
        reward_weights: the weights `tool` and `score` in that total.
        texts: the decoded text of each segment, so that a viewer can colour by provenance without a tokenizer.
        token_values: see `sequence_record`.
        earlier: the `sequence_record`s of the sequences before the agent rewrote its history, in time order.

    Raises:
        ValueError: `texts` does not have one entry per segment.
    """
    head = {"gts": _ground_truth(row), "score": score, "step": step, "uid": None}
    known = {key: strip_pixels(row[key]) for key in _ROW_KEYS if key in row}
    flat = {
        "attempt": row.get("attempt", trajectory.metrics.get("attempt", 0)),
        "reward_weights": reward_weights or {"tool": 1.0, "score": 1.0},
    }
    sequence = sequence_record(trajectory, token_values, input=input, output=output, texts=texts)
    first = {key: sequence.pop(key) for key in ("input", "output")}  # first, for human readers
    flat_row = cast("dict[str, JsonValue]", json_safe(head | known | flat))
    return first | flat_row | {"earlier": [dict(each) for each in earlier]} | sequence


def strip_pixels(value: object) -> object:
    """Replaces each image in `value` by its size and digest; rows contain images for their tools."""
    if isinstance(value, Mapping):
        return {key: strip_pixels(member) for key, member in value.items()}
    if isinstance(value, list):
        return [strip_pixels(member) for member in value]
    data = value.encode("utf-8", "replace") if isinstance(value, str) and _DATA_ADDRESS.match(value) else value
    if isinstance(data, bytes) and len(data) >= _MIN_IMAGE_BYTES:
        return {"bytes": len(data), "digest": hashlib.blake2b(data, digest_size=8).hexdigest()}
    return value


def sequence_record(
    trajectory: Trajectory,
    token_values: Mapping[str, Sequence[float | None]] | None = None,
    *,
    input: str,
    output: str,
    texts: Sequence[str] | None = None,
) -> dict[str, JsonValue]:
    """Builds the record of a single sequence: decoded prompt and response, ids, mask, log-probs, `Trajectory.to_record()`
    and the `token_values` (see `TOKEN_VALUES`; at least one per token), to six digits; None: the trainer masked the token.

    Raises:
        ValueError: `texts` does not have one entry per segment.
    """
    record = trajectory.to_record()
    if texts is not None:
        if len(texts) != len(trajectory.segments):
            raise ValueError(f"{len(texts)} texts for {len(trajectory.segments)} segments")
        record["segments"] = [segment | {"text": text} for segment, text in zip(record["segments"], texts)]
    mask = trajectory.response_mask
    values = {
        name: [None if value is None else float(f"{value:.6g}") for value in column[: len(mask)]]
        for name, column in (token_values or {}).items()
    }
    flat: dict[str, Any] = ({"token_values": values} if values else {}) | {
        "response_ids": trajectory.response_ids,
        "response_mask": mask,
        "response_log_probs": trajectory.response_log_probs,
        "assistant_turns": trajectory.assistant_turns,
        "user_turns": trajectory.user_turns,
        "metrics": trajectory.metrics,
    }
    return cast("dict[str, JsonValue]", json_safe({"input": input, "output": output} | flat | record))


def _ground_truth(row: Mapping[str, Any]) -> object:
    reward_model = row.get("reward_model")
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None


def trajectory_from_record(record: Mapping[str, Any]) -> Trajectory:
    """Restores the trajectory that `rollout_record` or `Trajectory.to_record` wrote.

    Segments, turns, tool calls, rewards and stop reason are exact; messages are as in the JSON. A log-prob or tool reward
    that was not finite becomes NaN, a non-finite score of the reward manager None.

    Raises:
        DataError: a key is missing or its value has the wrong type; names the key.
    """
    segments = _field(record, "segments", lambda items: [_segment(item) for item in items])
    sampled_turns = {segment.turn for segment in segments if segment.provenance is Provenance.SAMPLED}
    assistant_turns = _field(record, "assistant_turns", int, len(sampled_turns))
    user_turns = _field(record, "num_turns", int, 0) - 1 - assistant_turns
    return Trajectory(
        request_id=_field(record, "request_id", str, ""),
        prompt_ids=_field(record, "prompt_ids", lambda ids: [int(token) for token in ids]),
        segments=segments,
        messages=_field(record, "messages", list, []),
        tool_calls=_field(record, "tool_calls", lambda calls: [ToolCallRecord(**call) for call in calls], []),
        rewards=_field(record, "rewards", _rewards, Rewards()),
        stop_reason=_field(record, "stop_reason", StopReason),
        assistant_turns=assistant_turns,
        user_turns=_field(record, "user_turns", int, max(user_turns, 0)),
        timings=_field(record, "timings", dict, {}),
        timeline=_field(record, "timeline", lambda spans: [(str(n), float(s), float(t)) for n, s, t in spans], []),
        metrics=_field(record, "metrics", dict, {}),
        sampling=_field(record, "sampling", dict, {}),
        extra_fields=_field(record, "extra_fields", dict, {}),
        role=_field(record, "role", str, ""),
        first_turn=_field(record, "first_turn", int, 0),
        kept_turns=_field(record, "kept_turns", lambda turns: [int(turn) for turn in turns], []),
    )


def sequences_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The records of a rollout's sequences in time order; the last is the main one, `record` itself.

    Raises:
        DataError: `earlier` is not a list of records.
    """
    return [*_field(record, "earlier", lambda items: [dict(item) for item in items], []), record]


TOKEN_VALUES = {
    "advantages": "advantage",
    "old_log_probs": "trainer's log-prob before the update",
    "log_probs": "trainer's log-prob in the update",
    "entropys": "entropy of the policy",
    "ref_log_prob": "reference's log-prob",
    "values": "value",
}
"""The trainer's per-token columns, with labels; a record's `token_values` has some of them."""


def token_values(record: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """The trainer's values of each response token in a record, None for tokens that the policy did not sample; columns whose
    length differs from that of the response are left out."""
    recorded, mask = record.get("token_values"), record.get("response_mask")
    if not isinstance(recorded, Mapping) or not isinstance(mask, list):
        return {}
    columns = {name: recorded[name] for name in TOKEN_VALUES if isinstance(recorded.get(name), list)}
    numbers = {
        name: [value if isinstance(value, int | float) else None for value in column]
        for name, column in columns.items()
    }
    return {name: column for name, column in numbers.items() if len(column) == len(mask)}


_REQUIRED = object()


def _field(record: Mapping[str, Any], key: str, convert: Callable[[Any], T], default: T | object = _REQUIRED) -> T:
    if key not in record and default is not _REQUIRED:
        return cast(T, default)
    if key not in record:
        raise DataError(f"rollout record: '{key}' is missing; was it written by another program?")
    try:
        return convert(record[key])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"rollout record: '{key}' is malformed: {type(error).__name__}: {one_line(error)}") from error


def _segment(item: Mapping[str, Any]) -> Segment:
    probs, versions = item.get("log_probs"), item.get("weight_versions")
    return Segment(
        token_ids=tuple(int(token) for token in item["token_ids"]),
        provenance=Provenance(item["provenance"]),
        turn=int(item["turn"]),
        log_probs=None if probs is None else tuple(_number(p) for p in probs),
        weight_versions=None if versions is None else tuple(int(v) for v in versions),
    ).checked()


def _rewards(item: Mapping[str, Any]) -> Rewards:
    return Rewards(
        steps=[(int(turn), str(tool), _number(value)) for turn, tool, value in item.get("steps", [])],
        final={str(tool): _number(value) for tool, value in item.get("final", {}).items()},
        score=None if item.get("score") is None else float(item["score"]),
        score_info=dict(item.get("score_info") or {}),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
