"""Rollout dumps: one JSON-lines file a step, one trajectory a line.

Invariant: a dump file is either absent or complete (temporary file, then rename), every line is strict JSON that any
reader accepts, and the segments of a written trajectory come back from it token for token, log-prob for log-prob. A
record can be replayed, re-scored and viewed without the model or its tokenizer. Of images it says how many there were,
their sizes and digests; it holds no pixels.

Deciding which trajectories to dump, and decoding their text, is the trainer's part. Nothing here imports torch, so that
viewers start fast; arrays and tensors are recognised by their `tolist`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

from pydantic import BaseModel

from etude.errors import DataError, EtudeError, one_line
from etude.trajectory import Provenance, Rewards, Segment, StopReason, ToolCallRecord, Trajectory

T = TypeVar("T")
JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

MAX_LINE_BYTES = 256 * 2**20  # a longer line is no rollout of ours
_MAX_DEPTH = 48  # deeper than any message; tool metrics may hold cycles
_MAX_INT_BITS = 1024  # far below the interpreter's limit for printing an integer
_MAX_REPR = 200
_SMALLEST_PICTURE = 64  # bytes
_DATA_ADDRESS = re.compile(r"data:[\w./+-]*;base64,")


def json_safe(value: object, _depth: int = 0) -> JsonValue:
    """`value` as plain JSON data; never raises for data of any kind.

    Non-finite numbers become None, bytes `{"base64": …}`, arrays and tensors lists, anything unknown its shortened
    `repr`; nesting deeper than 48 levels is cut.
    """
    if value is None or isinstance(value, bool):
        return value
    if _depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, Enum):
        return json_safe(value.value, _depth + 1)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MAX_INT_BITS else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return str(value)
    return _json_safe_object(value, _depth + 1)


def _json_safe_object(value: object, depth: int) -> JsonValue:
    if isinstance(value, Mapping):
        return {str(json_safe(key)): json_safe(item, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_safe(item, depth) for item in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": base64.b64encode(bytes(value)).decode("ascii")}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BaseModel) or (is_dataclass(value) and not isinstance(value, type)):
        return json_safe(dict(vars(value)), depth)
    if callable(getattr(value, "tolist", None)):  # numpy and torch, scalars included
        listed = cast(Any, value).tolist()
        return repr(value)[:_MAX_REPR] if type(listed) is type(value) else json_safe(listed, depth)
    return _short_repr(value)


def _short_repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a tool's own class may fail to print itself
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_REPR else text[: _MAX_REPR - 1] + "…"


def json_line(record: object) -> bytes:
    """`record` as one line of UTF-8 JSON, newline included. Text with lone surrogates is written as ASCII escapes."""
    safe = json_safe(record)
    try:
        return json.dumps(safe, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(safe, allow_nan=False).encode() + b"\n"


@contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file beside `path` that replaces it when the block ends well and vanishes otherwise.

    Raises:
        EtudeError: the file cannot be written; names it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise EtudeError(f"cannot write {path}: {one_line(error)}; check folder and disk space") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_rollouts(folder: Path | str, step: int, records: Iterable[Mapping[str, object]]) -> Path:
    """Writes `records` to `{folder}/{step}.jsonl`, replacing an earlier file of that step, and returns its path.

    Raises:
        EtudeError: the file cannot be written; names it.
    """
    path = Path(folder) / f"{step}.jsonl"
    with written_atomically(path) as file:
        for record in records:
            file.write(json_line(record))
    return path


def read_rollouts(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yields the records of one dump file, one at a time.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object; names file and line.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if line.strip():
                    yield _parse_line(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from error


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise DataError(f"{where}: line longer than {MAX_LINE_BYTES // 2**20} MiB; this is no rollout dump")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: not JSON ({one_line(error, 120)}); this is no rollout dump, or it was cut or edited"
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
    return record


def dump_steps(folder: Path | str) -> list[int]:
    """The steps that have a dump file in `folder`, ascending; empty if there is no such folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isascii() and path.stem.isdigit())


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
) -> dict[str, JsonValue]:
    """One line of a dump: `Trajectory.to_record()` plus what is needed to re-score it and to read it by eye.

    Args:
        row: the data row (`uid`, `reward_model.ground_truth`, `data_source`, `extra_info` …); `attempt` counts the
            infrastructure retries before this one, 0 for the first try.
        input, output: decoded prompt and response, special tokens kept.
        score: the weighted total reward; None for a trajectory that was dropped.
        reward_weights: the weights behind it, `tool` and `score`.
        texts: the decoded text of each segment, so that a viewer can colour by provenance without a tokenizer.
        earlier: the `sequence_record`s of what the agent left behind where it rewrote its history, in time order.

    Raises:
        ValueError: `texts` has not one entry a segment.
    """
    head = {"gts": _ground_truth(row), "score": score, "step": step, "uid": None}
    known = {key: without_pixels(row[key]) for key in _ROW_KEYS if key in row}
    flat = {
        "attempt": row.get("attempt", trajectory.metrics.get("attempt", 0)),
        "reward_weights": reward_weights or {"tool": 1.0, "score": 1.0},
    }
    sequence = sequence_record(trajectory, input=input, output=output, texts=texts)
    first = {key: sequence.pop(key) for key in ("input", "output")}  # what one reads by eye
    told = cast("dict[str, JsonValue]", json_safe(head | known | flat))
    return first | told | {"earlier": [dict(each) for each in earlier]} | sequence


def without_pixels(value: object) -> object:
    """`value` with the size and digest of each picture in it instead of its bytes: a row hands its tools pictures."""
    if isinstance(value, Mapping):
        return {key: without_pixels(member) for key, member in value.items()}
    if isinstance(value, list):
        return [without_pixels(member) for member in value]
    data = value.encode("utf-8", "replace") if isinstance(value, str) and _DATA_ADDRESS.match(value) else value
    if isinstance(data, bytes) and len(data) >= _SMALLEST_PICTURE:
        return {"bytes": len(data), "digest": hashlib.blake2b(data, digest_size=8).hexdigest()}
    return value


def sequence_record(
    trajectory: Trajectory, *, input: str, output: str, texts: Sequence[str] | None = None
) -> dict[str, JsonValue]:
    """One sequence alone: its decoded prompt and response, ids, mask, log-probs and `Trajectory.to_record()`.

    Raises:
        ValueError: `texts` has not one entry a segment.
    """
    record = trajectory.to_record()
    if texts is not None:
        if len(texts) != len(trajectory.segments):
            raise ValueError(f"{len(texts)} texts for {len(trajectory.segments)} segments")
        record["segments"] = [segment | {"text": text} for segment, text in zip(record["segments"], texts)]
    flat = {
        "response_ids": trajectory.response_ids,
        "response_mask": trajectory.response_mask,
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
    """The trajectory that `rollout_record` or `Trajectory.to_record` wrote.

    Segments, turns, tool calls, rewards and stop reason are exact; messages are as JSON holds them. A log-prob or a tool's
    reward that was not finite is NaN, such a score of the reward manager None.

    Raises:
        DataError: a key is missing or holds the wrong kind of value; names the key.
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
        metrics=_field(record, "metrics", dict, {}),
        sampling=_field(record, "sampling", dict, {}),
        extra_fields=_field(record, "extra_fields", dict, {}),
    )


def sequences_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The records of a rollout's sequences in time order; the last is the main one, `record` itself.

    Raises:
        DataError: `earlier` is no list of records.
    """
    return [*_field(record, "earlier", lambda items: [dict(item) for item in items], []), record]


_REQUIRED = object()


def _field(record: Mapping[str, Any], key: str, convert: Callable[[Any], T], default: T | object = _REQUIRED) -> T:
    if key not in record and default is not _REQUIRED:
        return cast(T, default)
    if key not in record:
        raise DataError(f"rollout record: '{key}' is missing; was it written by another program?")
    try:
        return convert(record[key])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
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
